"""Give what a restore with a target and transforms makes of a checkpoint, one leaf at a time."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from flax_ckpt_compat import config
from flax_ckpt_compat._convert.jobs import FILES, Job
from flax_ckpt_compat._core.backend import KIND_OF_TYPE, Format, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Branch, KeyData, Node, Path, iter_leaves, map_leaves, show_path
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._restore import execute, policies
from flax_ckpt_compat._restore.items import plan_all
from flax_ckpt_compat._restore.plan import LeafPlan, RestoreOptions, TreePlan
from flax_ckpt_compat._trees import prng_keys
from flax_ckpt_compat._trees.leaf_sources import Derived, is_array

_KINDS = {**KIND_OF_TYPE, bytes: LeafKind.BYTES, np.ndarray: LeafKind.ARRAY, KeyData: LeafKind.PRNG_KEY}


def trees_of(opened: Opened, job: Job, rewritten: Collection[str], notes: list[str]) -> tuple[dict[str, Node], bool]:
    """Return item name → tree to write, and whether they are a mapping; raise what `flax_ckpt_compat.restore` does.

    Items that are not ``rewritten``, but copied, must stay as they are: UnsupportedLeafError otherwise."""
    options = RestoreOptions.strict(job.transforms, True)
    known = copy.copy(opened)  # without the items that only their own handlers read: these are copied
    known.contents = dataclasses.replace(opened.contents, unknown=())
    plan_of_all = plan_all(known, job.target, options)
    plans = {name: plan for name, plan in plan_of_all.items.items() if name not in opened.items or name in opened.trees}
    for name, plan in plans.items():
        policies.enforce(plan)
        if name in opened.items and name not in rewritten and job.to not in FILES and not _is_unchanged(plan):
            raise UnsupportedLeafError(
                f"{opened.path}: the transforms change the item {name!r}, which is no tree: its own handler could "
                "not read the result; leave it out of them, or convert the others alone (item=, --item)",
                path=opened.path,
            )
    unused = [show_path(path) for plan in plans.values() for path in plan.unused]
    if unused := [*unused, *(name for name in rewritten if name not in plans and "" not in plans)]:
        notes.append(f"not converted, as the target has no place for them: {one_line(unused)}")
    return {name: _tree_of(plan) for name, plan in plans.items()}, plan_of_all.is_mapping


def _is_unchanged(plan: TreePlan) -> bool:
    stored = [leaf for _, leaf in iter_leaves(plan.reader.tree) if isinstance(leaf, LeafHandle)]
    return [leaf.source for leaf in plan.leaves] == stored and all(leaf.cast is None for leaf in plan.leaves)


def _tree_of(plan: TreePlan) -> Node:
    """Return what a plan makes, in the target's containers; what it takes as it is stored, in the stored ones."""
    leaves = map(_Computed(plan).leaf, plan.leaves)

    def filled(node: Node, path: Path) -> Node:
        if path in plan.stored_subtrees:
            return map_leaves(lambda *_: next(leaves), plan.stored_subtrees[path])
        if not isinstance(node, Branch):
            return next(leaves)
        children = {name: filled(child, (*path, name)) for name, child in node.children.items()}
        return Branch(children, node.container, node.int_keys)

    return filled(plan.tree if plan.target is None else plan.target.node, ())


class _Computed(Reader):
    """Reader of what a plan makes of stored leaves; arrays are computed each time that they are read."""

    format, places_on_device, keeps_lists, tree = Format.MSGPACK, False, False, None

    def __init__(self, plan: TreePlan):
        self.location, self._plan = plan.reader.location, plan

    def leaf(self, leaf: LeafPlan) -> Any:
        """Return the handle of a leaf, that of the source if it is stored as it will be; None for None."""
        source: Any = leaf.source
        is_stored = isinstance(source, LeafHandle) and source.kind is LeafKind.ARRAY
        if is_stored and leaf.cast is None:
            return source
        compute = functools.partial(_compute, self._plan, leaf)
        if is_stored or (isinstance(source, Derived) and is_array(source)):
            return self._handle(LeafKind.ARRAY, source.shape, np.dtype(leaf.cast or source.dtype), compute)
        value = compute()  # only now, its shape is known
        kind = LeafKind.NUMPY_SCALAR if isinstance(value, np.generic) else _KINDS.get(type(value))
        read = compute if kind is LeafKind.ARRAY else lambda: value
        data = value.data if isinstance(value, KeyData) else value
        return value if kind is None else self._handle(kind, np.shape(data), getattr(data, "dtype", None), read)

    def _handle(self, kind: LeafKind, shape: tuple[int, ...], dtype: Any, compute: Callable[[], Any]) -> LeafHandle:
        nbytes = 0 if dtype is None else math.prod(shape) * dtype.itemsize
        return LeafHandle((), kind, tuple(shape), dtype, nbytes, None, self, compute)

    def read(self, handles: Sequence[LeafHandle], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """See `flax_ckpt_compat._core.backend.Reader.read`."""
        return [one.cut(one.locator()) for one in handles]


def _compute(plan: TreePlan, leaf: LeafPlan) -> Any:
    """Return the value of a leaf in host memory."""
    host = dataclasses.replace(leaf, sharding=None, slices=None)
    with config.override(mapped=False):
        values, shapes = execute.Execution(dataclasses.replace(plan, leaves=[host])).read().place()
    policies.enforce_shapes(plan, shapes)
    value = prng_keys.split_key(values[0])
    if isinstance(value, KeyData):
        return KeyData(value.impl, np.asarray(value.data))
    is_array = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)  # whose mask would be lost
    return np.asarray(value) if is_array or hasattr(value, "sharding") else value
