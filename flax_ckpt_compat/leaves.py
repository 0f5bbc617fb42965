"""Leaves on their way from a checkpoint to a target: stored, computed from stored ones, or left to the target."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Part
from flax_ckpt_compat._core.tree import iter_leaves


class Own(enum.Enum):
    """The leaf of a tree of sources that says: here the target keeps its own value."""

    TARGET = "from the target"


@dataclasses.dataclass(slots=True, eq=False)  # not frozen, which makes it thrice as slow to make
class Stored:
    """A target leaf that comes from the checkpoint.

    Attributes:
        node: a leaf handle, a `Computed`, None, or a whole branch where the target asks for whatever is there.
        target: the target's leaf, which says how to place and cast; None says nothing.
        cast: cast arrays to the target's dtype, whatever the settings say.
    """

    node: Any
    target: Any
    cast: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A target leaf that keeps the target's value.

    Attributes:
        value: the target's leaf.
        why: the reason, in a few words.
    """

    value: Any
    why: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A leaf that is computed from stored ones when it is asked for.

    Attributes:
        inputs: `LeafHandle`s, `Part`s and `Computed`s, whose values are host memory (``np.ndarray``, Python values);
            or `Stored`s, whose values are placed and cast as their targets say, for functions of the user.
        function: takes the inputs' values in their order and must not write to them.
        shape: of the result; None where only the function knows.
        dtype: of the result; None where only the function knows.
        how: what is done, in a few words, such as ``stack of 12`` or ``float32 → bfloat16``.
    """

    inputs: tuple[LeafHandle | Part | Computed | Stored, ...]
    function: Callable[..., Any]
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None
    how: str

    @property
    def handles(self) -> list[LeafHandle]:
        """The stored leaves that it needs, or needs a part of, each once, in the order of the inputs."""
        found: dict[int, LeafHandle] = {}
        for one in self.inputs:
            for handle in handles_of(one):
                found.setdefault(id(handle), handle)
        return list(found.values())


def handles_of(source: Any) -> list[LeafHandle]:
    """The stored leaves behind a leaf, or one input, of a tree of sources; none behind None and `Own`."""
    if isinstance(source, LeafHandle):
        return [source]
    if isinstance(source, Part):
        return [source.handle]
    if isinstance(source, Stored):
        return handles_of(source.node)
    return source.handles if isinstance(source, Computed) else []


def is_array(leaf: Any) -> bool:
    """True for a stored array or numpy scalar, and for a computed leaf whose shape and dtype are known."""
    if isinstance(leaf, LeafHandle):
        return leaf.kind in (LeafKind.ARRAY, LeafKind.NUMPY_SCALAR) and leaf.dtype is not None
    return isinstance(leaf, Computed) and leaf.shape is not None and leaf.dtype is not None


def needs(source: Any) -> dict[Any, int]:
    """What has to be read for a source: something that is the same for the same bytes → their number, in memory.

    Args:
        source: `Stored`, `Kept`, a leaf of a tree of sources, or an input.
    """
    if isinstance(source, Stored):
        return {key: size for _, leaf in iter_leaves(source.node) for key, size in needs(leaf).items()}
    if isinstance(source, LeafHandle):
        return {id(source): source.nbytes}
    if isinstance(source, Part):
        sides = tuple((side.start, side.stop) for side in source.index)
        elements = math.prod(stop - start for start, stop in sides)
        return {(id(source.handle), sides): source.handle.nbytes * elements // max(math.prod(source.handle.shape), 1)}
    if isinstance(source, Computed):
        return {key: size for one in source.inputs for key, size in needs(one).items()}
    return {}


def box(leaf: Any, index: tuple[slice, ...]) -> Part | Computed:
    """A box of an array leaf (see `is_array`), of which nothing else is read where the leaf is stored.

    Args:
        leaf: the array.
        index: start and stop on every axis, without steps.
    """
    if isinstance(leaf, LeafHandle) and leaf.kind is LeafKind.ARRAY:
        return Part(leaf, index)
    shape = tuple(side.stop - side.start for side in index)
    return Computed((leaf,), lambda value: value[index], shape, leaf.dtype, "a part")
