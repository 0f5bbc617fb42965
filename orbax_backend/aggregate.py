"""Read the msgpack file ``checkpoint`` that Orbax wrote until 0.5.15: the tree, and some of its values.

Each leaf is its value or a placeholder text. As in real Orbax, what follows the placeholder's scheme is ignored
(format of releases 0.1 to 0.5, measured).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import UnrecognizedFormatError
from flax_ckpt_compat._core.orbax_layout import MSGPACK_FILE
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path

from .metadata import DICT_KEY, SEQUENCE_KEY

# The second prefix is of releases up to 0.0.22 (history of Orbax).
_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")
_EMPTY = {Container.DICT: "Dict", Container.LIST: "List", Container.TUPLE: "Tuple"}

Keys = tuple[tuple[str, int], ...]
OpenMsgpack = Callable[[str], Reader]


class Aggregate:
    """An open msgpack file.

    Attributes:
        file: path.
        leaves: keys → leaf, in stored order: a handle of the msgpack file, None for a placeholder, or Orbax's name
            of an empty node.
    """

    def __init__(self, file: str, reader: Reader) -> None:
        self.file = file
        self._reader = reader
        self.leaves: dict[Keys, LeafHandle | str | None] = {}
        self._collect(reader.tree, ())
        self._values = {_names(keys): leaf for keys, leaf in self.leaves.items() if isinstance(leaf, LeafHandle)}

    def value(self, path: Path) -> LeafHandle | None:
        """Return the handle of a leaf, or None if its value is not in the file."""
        return self._values.get(path)

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:
        """Return the values of handles and slices."""
        return self._reader.read(handles, mapped=mapped)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def _collect(self, node: Node, keys: Keys) -> None:
        if isinstance(node, Branch) and node.children:
            kind = SEQUENCE_KEY if node.container.is_sequence else DICT_KEY
            for name, child in node.children.items():
                self._collect(child, (*keys, (name, kind)))
        elif isinstance(node, Branch):
            self.leaves[keys] = _EMPTY.get(node.container, "Dict")
        elif node is None:
            self.leaves[keys] = "None"
        else:
            self.leaves[keys] = None if _is_placeholder(node) else node


def open_aggregate(path: str, open_msgpack: OpenMsgpack | None) -> Aggregate | None:
    """Open the msgpack file of a checkpoint directory; return None if there is none.

    Raises:
        CorruptCheckpointError: it does not decode.
    """
    file = os.path.join(path, MSGPACK_FILE)
    if not paths.isfile(file):
        return None
    if open_msgpack is None:
        raise UnrecognizedFormatError(
            f"{file}: values of this checkpoint are in a msgpack file, but no msgpack reader was given; "
            f"open it with flax_ckpt_compat.checkpoints.restore_checkpoint",
            path=file,
        )
    return Aggregate(file, open_msgpack(file))


def _is_placeholder(leaf: LeafHandle) -> bool:
    return leaf.kind is LeafKind.STR and str(leaf.read()).startswith(_PLACEHOLDERS)


def _names(keys: Keys) -> Path:
    return tuple(name for name, _ in keys)
