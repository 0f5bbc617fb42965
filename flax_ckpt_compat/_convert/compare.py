"""Compare a written checkpoint with its source, bit by bit, as `flax_ckpt_compat.diff` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat._convert import item_copies, output_writers
from flax_ckpt_compat._convert.output_trees import Output, array_nbytes
from flax_ckpt_compat._core.backend import KIND_OF_TYPE, ArraySlice, Format, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.fold_names import one_line
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import KeyData, Node, Path, StoredArray, map_leaves
from flax_ckpt_compat._view.diff import Comparison, LeafDifference
from flax_ckpt_compat._view.metadata import StoredLeaves

Progress = Callable[[int], None]
_WORDS = {"only in a": "is missing", "only in b": "is new", "values": "has other values"}


class DifferentError(CheckpointError):
    """A result does not hold what its source holds."""


def compare(location: Location, to: str, output: Output, progress: Progress) -> None:
    """Raise DifferentError unless a checkpoint holds exactly this output; ``progress`` takes the bytes compared."""
    with output_writers.reading(location, to, output) as trees:
        wanted = {name: _to_write(tree, location) for name, tree in {**output.trees, **output.copied_trees}.items()}
        a, b = _leaves(location, wanted), _leaves(location, trees)
        differences = [_words(one) for one in Comparison(a, b, None).result(lambda _: progress).differences]
        # What else an empty node was, not every format keeps.
        nones = [path for path, what in a.empty.items() if (what == "None") != (b.empty.get(path, what) == "None")]
        differences += [f"{'/'.join(path)} is {b.empty[path]}, expected {a.empty[path]}" for path in nones]
    for item, copy in output.copies.items():
        if why := copy.difference(location / item):
            differences.append(f"{item} {why}")
    for beside, file in output.files.items():
        copied = location / beside
        if not copied.isfile() or item_copies.is_other(file, copied):
            differences.append(f"{beside} has other bytes")
    if output_writers.has_other_metadata(location, to, output):
        differences.append("custom metadata is other JSON")
    if differences:
        raise DifferentError(
            f"{location} does not hold what its source holds: {one_line(differences)}; the source may have been "
            "replaced meanwhile: convert it again, to another place",
            path=location.path,
        )


def counted(output: Output, progress: Progress) -> None:
    """Report the size of each array, or part of one, to ``progress`` when it is read to be written."""

    def read(read: Callable[..., Any], *box: Any) -> Any:
        value = read(*box)
        progress(value.nbytes)
        return value

    for leaf in output.leaves.values():
        array = leaf.data if isinstance(leaf, KeyData) else leaf
        if isinstance(array, StoredArray):
            array.read = functools.partial(read, array.read)
            array.read_part = array.read_part and functools.partial(read, array.read_part)


def _leaves(location: Location, trees: Mapping[str, Node]) -> StoredLeaves:
    found = StoredLeaves(location.path, "")
    for name, tree in trees.items():
        found.add(tree, (name,) if name else ())
    return found


def _words(one: LeafDifference) -> str:
    return f"{one.path} {_WORDS.get(one.kind) or f'is {one.b}, expected {one.a}'}"


def _to_write(tree: Node, location: Location) -> Node:
    """Return a tree with a handle for each leaf: that of the source, or one of the value that is written."""
    reader = _Values(location)
    return map_leaves(lambda path, leaf: reader.handle(path, leaf), tree)


class _Values(Reader):
    """Reader of values that are written: they are there, or computed again from the source."""

    format, places_on_device, keeps_lists = Format.MSGPACK, False, False

    def __init__(self, location: Location):
        self.location, self.tree = location, None

    def handle(self, path: Path, leaf: Any) -> Any:
        """Return the handle of a leaf; empty nodes stay what they are."""
        if isinstance(leaf, StoredArray) and leaf.handle is not None:
            return leaf.handle
        kind, like = _kind(leaf), leaf.data if isinstance(leaf, KeyData) else leaf
        if kind is None:
            return leaf
        shape, dtype = getattr(like, "shape", ()), getattr(like, "dtype", None)
        return LeafHandle(path, kind, shape, dtype, array_nbytes(leaf), None, self, leaf)

    def boxes(self, handle: LeafHandle, nbytes: int) -> Iterator[tuple[slice, ...]]:  # noqa: ARG002
        """Yield the whole array: to compute a part takes as long."""
        yield tuple(slice(0, size) for size in handle.shape)

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """See `flax_ckpt_compat._core.backend.Reader.read`."""
        return [
            _value(one.locator) if isinstance(one, LeafHandle) else one.cut(_value(one.handle.locator))
            for one in handles
        ]


def _value(leaf: Any) -> Any:
    if isinstance(leaf, KeyData):
        return KeyData(leaf.impl, np.asarray(leaf.data))
    return np.asarray(leaf) if isinstance(leaf, StoredArray) else leaf


def _kind(leaf: Any) -> LeafKind | None:
    kinds = {StoredArray: LeafKind.ARRAY, KeyData: LeafKind.PRNG_KEY, bytes: LeafKind.BYTES, **KIND_OF_TYPE}
    return LeafKind.NUMPY_SCALAR if isinstance(leaf, np.generic) else kinds.get(type(leaf))
