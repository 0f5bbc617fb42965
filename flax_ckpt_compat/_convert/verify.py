"""Compare a written checkpoint with its source, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flax_ckpt_compat._convert import layouts, stored_trees
from flax_ckpt_compat._convert.contents import Contents
from flax_ckpt_compat._convert.safetensors import FileArray
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle
from flax_ckpt_compat._core.equality import same_bits
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.folding import one_line
from flax_ckpt_compat._core.thread_pools import in_parallel
from flax_ckpt_compat._core.tree import Branch, KeyData, Path, StoredArray, show_path

Name = tuple[str, Path]
Pair = tuple[Callable[[], Any], Callable[[], Any]]
# Bytes; larger arrays are compared in parts, so many at once.
_PART = 8 << 20
_AT_ONCE = 3
_OTHER_VALUES = "has other values"


class DifferentError(CheckpointError):
    """A result does not hold what its source holds."""


def verify(path: str, to: str, contents: Contents, progress: Callable[[int], None]) -> None:
    """Raise unless a checkpoint holds exactly these leaves; the arrays of its source are read again.

    Args:
        path: the checkpoint.
        to: its layout.
        contents: what it should hold.
        progress: takes numbers of bytes of arrays that are compared in parts.

    Raises:
        DifferentError: names the leaves that differ.
    """
    expected = contents.leaves
    with layouts.reading(path, to, contents) as found:
        differences = {name: "is missing" for name in expected if name not in found}
        differences |= {name: "is new" for name in found if name not in expected}
        small = stored_trees.Leaves([leaf for leaf in found.values() if isinstance(leaf, LeafHandle)])
        parts: list[tuple[Name, Pair]] = []
        for name in expected.keys() & found.keys() if differences else found:
            leaf = small.leaf(found[name])
            if why := _difference(expected[name], leaf):
                differences[name] = why
            elif isinstance(leaf, StoredArray | FileArray):
                pair = expected[name], leaf
                if _is_in_parts(expected[name]):
                    parts += [(name, part) for part in _parts(*pair)]
                elif not same_bits(np.asarray(expected[name]), np.asarray(leaf)):
                    differences[name] = _OTHER_VALUES

        def compare(part: tuple[Name, Pair]) -> None:
            name, (left, right) = part
            one, other = left(), right()
            progress(one.nbytes)
            if not same_bits(one, other):
                differences[name] = _OTHER_VALUES

        in_parallel(compare, parts, _AT_ONCE)
    if differences:
        shown = one_line(f"{show_path(keys)} {why}" for (_, keys), why in differences.items())
        raise DifferentError(
            f"{path} does not hold what its source holds: {shown}; the source may have been replaced "
            "meanwhile: convert it again, to another place",
            path=path,
        )


def _difference(expected: Any, found: Any) -> str | None:
    """Return how two leaves differ, without the values of arrays; or None."""
    if isinstance(expected, StoredArray) and isinstance(found, StoredArray | FileArray):
        if (expected.shape, expected.dtype) == (found.shape, found.dtype):
            return None
        return f"is {found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}"
    if type(expected) is not type(found):
        return f"is of type {type(found).__name__}, expected {type(expected).__name__}"
    if isinstance(expected, KeyData):
        same = same_bits(KeyData(expected.impl, np.asarray(expected.data)), KeyData(found.impl, np.asarray(found.data)))
        return None if same else "is another key"
    if isinstance(expected, Branch):
        return None  # without children, both
    return None if same_bits(expected, found) else f"is {found!r}, expected {expected!r}"


def _is_in_parts(expected: StoredArray) -> bool:
    return expected.handle is not None and expected.nbytes > _PART


def _parts(expected: StoredArray, found: StoredArray | FileArray) -> Iterator[Pair]:
    """Yield the readers of equal parts of two arrays."""
    handle = expected.handle
    for box in handle.reader.boxes(handle, _PART):
        left = functools.partial(_read_part, handle, box)
        yield (
            left,
            functools.partial(found.part, box)
            if isinstance(found, FileArray)
            else functools.partial(_read_part, found.handle, box),
        )


def _read_part(handle: LeafHandle, box: tuple[slice, ...]) -> Any:
    return handle.reader.read([ArraySlice(handle, box)])[0]
