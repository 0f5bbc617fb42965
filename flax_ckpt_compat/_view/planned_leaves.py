"""Describe the leaves of a planned restore: where each comes from, and what it becomes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves, show_path
from flax_ckpt_compat._restore.plan import LeafPlan, TreePlan
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, handles_of, needs, shape_and_dtype

Owners = dict[Reader, str]  # reader of an item → its name


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLeaf:
    """One leaf of the result.

    Attributes:
        path: its key path, joined with ``/``.
        origin: ``checkpoint`` (as stored), ``computed`` (from stored leaves), ``target`` (its own value is kept), or
            ``missing`` (the restore is going to raise).
        sources: key paths of the stored leaves that it comes from.
        how: the computation, or the reason why the target's value is kept; else empty.
        shape: of the result; None if it is not an array, or only a function of the caller's knows.
        dtype: of the result, after casting; None as for ``shape``.
        target_shape, target_dtype: of the target's leaf; None if it is not an array.
        nbytes: size in memory of the stored data that it needs, in bytes.
    """

    path: str
    origin: str
    sources: tuple[str, ...]
    how: str
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None
    target_shape: tuple[int, ...] | None
    target_dtype: np.dtype[Any] | None
    nbytes: int

    @property
    def is_reshaped(self) -> bool:
        """Return whether the result has another shape than the target's leaf."""
        return self.shape is not None and self.target_shape is not None and self.shape != self.target_shape

    @property
    def is_retyped(self) -> bool:
        """Return whether the result has another dtype than the target's leaf."""
        return self.dtype is not None and self.target_dtype is not None and self.dtype != self.target_dtype


def _source(handle: LeafHandle, item: Path, owners: Owners) -> str:
    """Return the key path of a stored leaf in the whole checkpoint."""
    owner = owners.get(handle.reader)
    return show_path((*(item if owner is None else (owner,)), *handle.path))


def planned_leaves(plan: TreePlan, item: Path, owners: Owners) -> Iterator[PlannedLeaf]:
    """Yield the leaves of a tree's plan; a subtree that is restored as stored counts as one."""
    raises = plan.options.settings.missing_leaves == "error" and not plan.options.transforms.lenient
    missing = frozenset(plan.missing) if raises else frozenset()
    subtrees = {} if plan.target is None else plan.stored_subtrees
    for path, group in itertools.groupby(plan.leaves, lambda leaf: leaf.path):
        if path in subtrees:
            yield _planned_subtree(path, subtrees[path], item, owners)
        else:
            for leaf in group:
                yield _planned(leaf, item, owners, "missing" if path in missing else "target")
    for path, stored in subtrees.items():
        if all(isinstance(leaf, Branch) for _, leaf in iter_leaves(stored)):  # without leaves
            yield _planned_subtree(path, stored, item, owners)
    for path in sorted(plan.empty):
        origin = "missing" if path in missing else "target"
        yield kept_leaf(show_path((*item, *path)), {}, "not in the checkpoint", origin)


def _planned_subtree(path: Path, stored: Node, item: Path, owners: Owners) -> PlannedLeaf:
    leaves = [leaf for _, leaf in iter_leaves(stored)]
    sources = tuple(_source(handle, item, owners) for leaf in leaves for handle in handles_of(leaf))
    how = "by the rules of the target's own type, or leaf by leaf if they refuse it"
    nbytes = sum(size for leaf in leaves for size in needs(leaf).values())
    return PlannedLeaf(show_path((*item, *path)), "checkpoint", sources, how, None, None, None, None, nbytes)


def _planned(leaf: LeafPlan, item: Path, owners: Owners, origin: str) -> PlannedLeaf:
    name, source, target = show_path((*item, *leaf.path)), leaf.source, leaf.target
    if source is Own.KEEP_TARGET:
        return kept_leaf(name, target, leaf.why, origin)
    (shape, dtype), wanted = shape_and_dtype(source), shape_and_dtype(target)
    if isinstance(source, LeafHandle) and source.kind is not LeafKind.ARRAY:
        # Of a key, shape and dtype are those of its data; Python values have none.
        if leaf.cast is not None:  # a number, converted to the target's type
            shape, dtype = ((), leaf.cast) if hasattr(target, "shape") else (None, None)
        elif source.kind is not LeafKind.NUMPY_SCALAR:
            wanted = shape, dtype = None, None
    is_cast = dtype is not None and leaf.cast is not None
    return PlannedLeaf(
        name,
        "computed" if isinstance(source, Derived) else "checkpoint",
        tuple(_source(handle, item, owners) for handle in handles_of(source)),
        source.how if isinstance(source, Derived) else "",
        shape,
        leaf.cast if is_cast else dtype,
        *wanted,
        sum(needs(source).values()),
    )


def kept_leaf(path: str, leaf: Any, why: str, origin: str = "target") -> PlannedLeaf:
    """Return a leaf that keeps the target's value, or is missing."""
    shape, dtype = shape_and_dtype(leaf)
    return PlannedLeaf(path, origin, (), why, shape, dtype, shape, dtype, 0)
