"""Read and write the msgpack file ``checkpoint`` that Orbax wrote until 0.5.15: the tree, and some of its values.

Each leaf is its value or a placeholder text. As in real Orbax, what follows the placeholder's scheme is ignored
(format of releases 0.1 to 0.5, measured).
"""

from __future__ import annotations

from collections.abc import Callable

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import DICT_KEY, MSGPACK_FILE, SEQUENCE_KEY
from flax_ckpt_compat._core.tree import Branch, Node, Path

from .files import CheckpointFiles
from .save_plan import EMPTY_MARKERS

# The second prefix is of releases up to 0.0.22 (history of Orbax).
_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")
Kinds = tuple[int, ...]  # Orbax's key type of each name of a path
OpenMsgpack = Callable[[Location], Reader]


class Aggregate:
    """An open msgpack file."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader  # reader of the file
        # Path, key types and leaf, in stored order: a handle of the file, None for a placeholder, or Orbax's name of an
        # empty node.
        self.leaves: list[tuple[Path, Kinds, LeafHandle | str | None]] = []
        # Path → folder of each array of T5X, which has TensorStore's spec in place of a placeholder.
        self.folders: dict[Path, str] = {}
        self._collect(reader.tree, (), ())
        # Path → handle of each leaf with its value in the file.
        self.values = {path: leaf for path, _, leaf in self.leaves if isinstance(leaf, LeafHandle)}

    def _collect(self, node: Node, path: Path, kinds: Kinds) -> None:
        if (folder := _folder_of_spec(node)) is not None:
            self.folders[path] = folder
            self.leaves.append((path, kinds, None))
        elif isinstance(node, Branch) and node.children:
            below = (*kinds, SEQUENCE_KEY if node.container.is_sequence else DICT_KEY)
            for name, child in node.children.items():
                self._collect(child, (*path, name), below)
        elif isinstance(node, Branch):
            self.leaves.append((path, kinds, EMPTY_MARKERS[node.container]))
        elif node is None:
            self.leaves.append((path, kinds, "None"))
        else:
            self.leaves.append((path, kinds, None if _is_placeholder(node) else node))


def open_aggregate(location: Location, open_msgpack: OpenMsgpack) -> Aggregate | None:
    """Open the msgpack file of a checkpoint directory; return None if there is none."""
    file = location / MSGPACK_FILE
    if not file.isfile():
        return None
    CheckpointFiles(location).check(MSGPACK_FILE)
    return Aggregate(open_msgpack(file))


def _folder_of_spec(node: Node) -> str | None:
    """Return the folder, beside the file, of the array that a spec of TensorStore describes; None for other nodes.

    The folder may have been moved since T5X wrote its path, which for buckets older specs have beside the kvstore
    (t5x/checkpoints.py, 2021 to 2024, documented)."""
    if not isinstance(node, Branch) or "driver" not in node.children:
        return None
    if "base" in node.children:  # of the driver ``cast``
        return _folder_of_spec(node.children["base"])
    kvstore = node.children.get("kvstore")
    if not isinstance(kvstore, Branch):
        return None
    at = kvstore.children.get("path", node.children.get("path"))
    if not isinstance(at, LeafHandle) or at.kind is not LeafKind.STR:
        return None
    return str(at.read()).rstrip("/").rpartition("/")[2] or None


def _is_placeholder(leaf: LeafHandle) -> bool:
    return leaf.kind is LeafKind.STR and str(leaf.read()).startswith(_PLACEHOLDERS)
