"""Define the sources of target leaves: derived from stored leaves, or the target's own; find leaves of like names."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import heapq
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.text_formatting import printable

_MAX_COMPARED = 40  # names: difflib is slow, so of more those that share the most pairs of letters
_AKIN = 0.6  # as attn and attention; encoder and Dense_0 are less alike


class Own(enum.Enum):
    """Sentinel leaf of a tree of sources: the target keeps its own value."""

    KEEP_TARGET = "from the target"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FunctionInput:
    """A stored leaf as an input of a user's function: placed and cast as for a leaf of the target."""

    handle: LeafHandle
    target: Any  # the leaf, or None for host memory


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """A leaf that is computed from stored ones on demand."""

    # `LeafHandle`s and `Derived`s, whose values are in host memory (``np.ndarray``, Python); or, for functions of the
    # user, `FunctionInput`s.
    inputs: tuple[LeafHandle | Derived | FunctionInput, ...]
    function: Callable[..., Any]  # takes the inputs' values in order and must not write to them
    shape: tuple[int, ...] | None  # of the result; None if only the function knows
    # Of the result; None if only the function knows, or if the result is `KeyData` of that shape of keys.
    dtype: np.dtype[Any] | None
    how: str  # the operation in a few words, such as ``stack of 12`` or ``float32 → bfloat16``

    @property
    def handles(self) -> list[LeafHandle]:
        """Return the stored leaves that it reads, in whole or in part; each once, in the order of the inputs."""
        return list(dict.fromkeys(handle for one in self.inputs for handle in handles_of(one)))


def handles_of(source: Any) -> list[LeafHandle]:
    """Return the stored leaves that a leaf of a tree of sources, or an input, reads; none for None and `Own`."""
    if isinstance(source, LeafHandle):
        return [source.whole or source]
    if isinstance(source, FunctionInput):
        return [source.handle]
    return source.handles if isinstance(source, Derived) else []


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is a stored array or numpy scalar, or derived with known shape and dtype."""
    if isinstance(leaf, LeafHandle):
        return leaf.kind in (LeafKind.ARRAY, LeafKind.NUMPY_SCALAR) and leaf.dtype is not None
    return isinstance(leaf, Derived) and leaf.shape is not None and leaf.dtype is not None


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is a stored or derived PRNG key (array)."""
    if isinstance(leaf, LeafHandle):
        return leaf.kind is LeafKind.PRNG_KEY
    return isinstance(leaf, Derived) and leaf.shape is not None and leaf.dtype is None


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...] | None, Any]:
    """Return shape and dtype of a target's leaf; both None unless it is an array, abstract or not.

    A class such as ``np.float32`` has attributes of these names too, but they describe no value.
    """
    shape = getattr(leaf, "shape", None)
    return (tuple(shape), getattr(leaf, "dtype", None)) if isinstance(shape, tuple) else (None, None)


def needs(source: Any) -> dict[Any, int]:
    """Return the reads of a source, or of an input: a key that is equal for equal reads → size in memory, in bytes."""
    if isinstance(source, FunctionInput):
        source = source.handle
    if isinstance(source, LeafHandle):
        return {(source.whole or source, str(source.index)): source.nbytes}  # slices have no hash
    if isinstance(source, Derived):
        return {key: size for one in source.inputs for key, size in needs(one).items()}
    return {}


def nearest(wanted: str, names: Iterable[str], free: Collection[str] = ()) -> list[str]:
    """Return at most two names akin to a key path, of those that have most of its levels.

    Those that are ``free``, of its shape and of no other use, are akin if all levels but one are equal."""
    ours, paths = wanted.split("/"), {name: name.split("/") for name in names}
    levels = {*ours}
    # An item of a list is like no other name.
    shared = {
        name: len(levels.intersection(path))
        for name, path in paths.items()
        if path[-1].isdecimal() or not ours[-1].isdecimal()
    }
    most = max(shared.values(), default=0)
    pairs = set(map(str.__add__, wanted, wanted[1:]))
    alike = {
        name: len(pairs.intersection(map(str.__add__, name, name[1:]))) / (len(name) + 1)
        for name, count in shared.items()
        if count == most
    }
    numbers = re.findall(r"\d+", wanted)
    same = {name for name in alike if re.findall(r"\d+", name) == numbers}
    found = heapq.nlargest(_MAX_COMPARED, alike, key=lambda name: (name in same, alike[name]))
    differ_in_one = free if most == len(levels) - 1 > 1 else ()
    akin = [name for name in found if name in differ_in_one or _are_akin(ours, paths[name])]
    # What is free, and then as many levels: an optimizer's moments have more. Numbers tell the layers of one row apart.
    ranks = {name: (name in free, -abs(len(paths[name]) - len(ours))) for name in akin}
    best = [name for name in akin if ranks[name] == max(ranks.values())]
    rows = {re.sub(r"\d+", "#", name) for name in same.intersection(best)}
    best = [name for name in best if name in same or re.sub(r"\d+", "#", name) not in rows]
    return [printable(name, one_line=True) for name in difflib.get_close_matches(wanted, best, 2, 0.5)]


def _are_akin(ours: list[str], theirs: list[str]) -> bool:
    """Return whether two key paths, or their ends, differ in the first name or else little: misspelt, a level more."""
    least = min(len(ours), len(theirs))
    if least > 2 and ours[1:] == theirs[1:]:
        return True
    for left, right in ((ours[:], theirs[:]), (ours[-least:], theirs[-least:])):
        for end in (0, -1):
            while left and right and left[end] == right[end]:
                del left[end], right[end]
        if not left or not right or difflib.SequenceMatcher(None, "/".join(left), "/".join(right)).ratio() >= _AKIN:
            return True
    return False
