"""Open a checkpoint to inspect it and to read parts of it: `open_checkpoint`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from typing import Any, SupportsFloat

from flax_ckpt_compat import config
from flax_ckpt_compat._core import arguments, memory
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.errors import ArgumentError, MissingLeavesError, NameCollisionError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.text_formatting import MAX_SHOWN, Row, listed, printable
from flax_ckpt_compat._core.tree import Branch, Node, Path, from_leaves, iter_leaves, joined, map_leaves, show_path
from flax_ckpt_compat._discovery import locating, opening, steps
from flax_ckpt_compat._discovery.contents import STEP_DIRECTORY, Layout
from flax_ckpt_compat._restore import pipeline as restore_pipeline
from flax_ckpt_compat._restore.call_arguments import item_name
from flax_ckpt_compat._restore.items import at_whole_path
from flax_ckpt_compat._trees import depth, state_dict
from flax_ckpt_compat._trees.leaf_sources import nearest
from flax_ckpt_compat._view import metadata
from flax_ckpt_compat._view.report import Report, _Shown

# ``a/b/0``, or ``("a", "b", 0)`` where a name itself contains a slash.
LeafPath = str | tuple[str | int, ...]


@depth.limited("opened")
def open_checkpoint(
    path: str | os.PathLike[str],
    step: SupportsFloat | str | None = None,
    prefix: str = "checkpoint_",
    item: str | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format without reading large arrays; close it, or use it in a ``with`` statement.

    Args:
        path: a directory of checkpoints, or one checkpoint.
        step: the step in the directory; None takes the latest complete one.
        prefix: literal text before the step in the checkpoints' names.
        item: the item of a checkpoint of several to open, as one tree; None opens all.

    Raises:
        ArgumentError: the checkpoint has no such item.
        CheckpointNotFoundError: there is no such checkpoint.
        IncompleteCheckpointError, UnrecognizedFormatError, CorruptCheckpointError: the checkpoint cannot be opened.
        StorageError: the file system refused.

    Example:
        >>> _ = save("runs", {"params": {"w": np.ones(2)}, "epoch": 4}, step=1)
        >>> with open_checkpoint("runs") as view:
        ...     print(sorted(view.leaves()), view.read("epoch"))
        ['epoch', 'params/w'] {'epoch': 4}
    """
    verify, item = config.current().checksums == "verify", item_name(item)
    checkpoint_dir = metadata.dir_without_pending_saves(path, prefix)

    def open_one(location: Location) -> Checkpoint:
        with ExitStack() as files:
            with locating.unchanged(location) as is_replaced:
                opened = files.enter_context(closing(opening.Opened(location, verify=verify, item=item)))
                name = os.path.basename(opened.path)
                match = STEP_DIRECTORY.fullmatch(name) if opened.contents.layout is Layout.ITEMS else None
                number = steps.step_of(name, checkpoint_dir.prefix)
                number = int(match[2]) if number is None and match else number
                checkpoint = Checkpoint(opened, number, is_replaced)
            files.pop_all()  # the checkpoint closes them
            return checkpoint

    return locating.read_found(checkpoint_dir, step, open_one, doing="open")


class Checkpoint(_Shown):
    """An open checkpoint: the structure is loaded, values are read on demand; notebooks show its tree.

    Attributes:
        path: absolute path of the file or directory.
        step: the number in its name, or None.
        format: ``msgpack``, ``orbax``, or the name of another layout, such as ``safetensors``.
        tree: the stored tree: dicts, lists and tuples with a ``LeafHandle`` for each leaf. A handle has ``path``,
            ``kind``, ``shape``, ``dtype``, ``nbytes`` (in memory), ``sharding`` (Orbax's JSON text) and ``name`` (in
            the format's own terms). For several items, a dict of item name → tree.
    """

    def __init__(self, opened: opening.Opened, step: float | None, is_replaced: Callable[[], bool]):
        self._opened, self._is_replaced = opened, is_replaced
        with memory.pause_gc(enabled=not opened.location.is_remote):
            trees = {name: opened.reader(name).tree for name in opened.parts}
            whole = Branch(trees) if opened.is_mapping else next(iter(trees.values()))
            self._root: Node = map_leaves(at_whole_path, whole)
            self.tree: Any = state_dict.from_stored(self._root, None, "stored")
        self.path, self.step, self.format = opened.path, step, opened.format

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        leaves = sum(1 for _ in self._handles())
        return f"<Checkpoint {printable(self.path, one_line=True)} ({self.format}), step {self.step}, {leaves} leaves>"

    __str__ = __repr__

    def _report(self) -> Report:
        from flax_ckpt_compat._view import show  # not for programs that only read

        return show.short_report(show.choose_among(self._opened))

    def close(self) -> None:
        """Close the files; values already read stay valid."""
        self._opened.close()

    def leaves(self) -> dict[str, LeafHandle]:
        """Return every leaf by its key path, joined with ``/``; None and empty containers are not leaves.

        Raises:
            NameCollisionError: two leaves have the same joined path, because a name contains ``/``.
        """
        found: dict[str, LeafHandle] = {}
        for path, handle in self._handles():
            shown = joined(path)
            if shown in found:
                raise NameCollisionError(
                    f"{self.path}: two leaves are both written {shown!r}; use .tree, and tuples as paths",
                    path=self.path,
                    leaf=shown,
                )
            found[shown] = handle
        return found

    @property
    def metadata(self) -> metadata.Metadata:
        """Return the checkpoint's metadata; read from its files at each access."""
        return metadata.read_metadata(self._opened)

    def read(self, paths: LeafPath | Iterable[LeafPath] | None = None) -> Any:
        """Read all leaves, or some, in the form of ``restore_checkpoint(…, target=None)``.

        Args:
            paths: path of a leaf or subtree, or a list of paths. A path is the text ``a/b/0`` or the tuple
                ``("a", "b", 0)``. None reads everything.

        Returns:
            Nested dicts with the chosen leaves at their key paths.

        Raises:
            MissingLeavesError: the checkpoint has no such path.
            ArgumentError: an argument is not a path.
            CheckpointNotFoundError: the checkpoint was removed after it was opened.
            ReplacedError: it is a directory, and another checkpoint has replaced it since it was opened.
            CorruptCheckpointError, StorageError: the values cannot be read.
        """
        root = self._root if paths is None else self._select(paths)
        trees = root.children if self._opened.is_mapping else {self._opened.parts[0]: root}
        location = self._opened.location
        with locating.unchanged(location, self._is_replaced):
            return restore_pipeline.read_state(self._opened, trees)

    def _handles(self) -> Iterable[tuple[Path, LeafHandle]]:
        return ((path, leaf) for path, leaf in iter_leaves(self._root) if isinstance(leaf, LeafHandle))

    def _select(self, given: Any) -> Node:
        """Return the part of the tree at some key paths; raise MissingLeavesError for those that are not there."""
        is_one = isinstance(given, str | tuple) or not isinstance(given, Iterable)
        is_one = is_one or getattr(given, "shape", None) == ()  # arrays without axes have the method, too
        paths = [given] if is_one else list(given)
        for path in paths:
            if not isinstance(path, str | tuple):
                raise ArgumentError(f"a leaf's path is text ('a/b/0') or a tuple of names; {arguments.found(path)}")
        wanted = dict.fromkeys(path if isinstance(path, str) else tuple(map(str, path)) for path in paths)
        named = functools.cache(lambda path: wanted.keys() & {path, joined(path), show_path(path)})
        found: set[str | Path] = set()
        leaves: dict[Path, Any] = {}
        for path, leaf in iter_leaves(self._root):
            if here := {name for end in range(len(path) + 1) for name in named(path[:end])}:
                leaves[path] = leaf
                found |= here
        missing = tuple(path if isinstance(path, str) else show_path(path) for path in wanted if path not in found)
        if missing:
            names = [show_path(path) for path, _ in iter_leaves(self._root)]
            near = {path: ", ".join(nearest(path, names)) or "nothing like it" for path in missing[:MAX_SHOWN]}
            rows = [Row((path,), (near.get(path, ""),)) for path in missing]
            lines = [f"{self.path} has no leaf and no subtree of these paths; stored is, see .leaves():", *listed(rows)]
            raise MissingLeavesError("\n".join(lines), path=self.path, leaf=missing[0], missing=missing)
        return from_leaves(leaves, self._root)  # a sequence with gaps becomes a dict of the indices
