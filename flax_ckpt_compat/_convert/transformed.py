"""Describe what a restore with a target and transforms makes of a checkpoint, one leaf at a time."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import numpy as np

from flax_ckpt_compat import config
from flax_ckpt_compat._convert import stored_trees
from flax_ckpt_compat._convert.jobs import FILES, Job
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import (
    Branch,
    Container,
    KeyData,
    Node,
    StoredArray,
    iter_leaves,
    map_leaves,
    show_path,
)
from flax_ckpt_compat._discovery.opening import Opened
from flax_ckpt_compat._restore import execute, policies
from flax_ckpt_compat._restore.items import plan_all
from flax_ckpt_compat._restore.options import RestoreOptions
from flax_ckpt_compat._restore.plan import LeafPlan, TreePlan
from flax_ckpt_compat._trees import prng_keys
from flax_ckpt_compat._trees.leaf_sources import Derived, is_array


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
        if plan.unused:
            notes.append(f"not converted, as the target has no place for them: {one_line(map(show_path, plan.unused))}")
    if left_out := [name for name in rewritten if name not in plans and "" not in plans]:
        notes.append(f"not converted, as the target has no place for them: {one_line(left_out)}")
    return {name: _tree_of(plan) for name, plan in plans.items()}, plan_of_all.is_mapping


def _is_unchanged(plan: TreePlan) -> bool:
    stored = [leaf for _, leaf in iter_leaves(plan.reader.tree) if isinstance(leaf, LeafHandle)]
    leaves = list(plan.single_leaves())
    return [leaf.source for leaf in leaves] == stored and all(leaf.cast is None for leaf in leaves)


def _tree_of(plan: TreePlan) -> Node:
    leaves = iter([_leaf(plan, leaf) for leaf in plan.single_leaves()])
    if plan.target is None:
        return map_leaves(lambda *_: next(leaves), plan.tree)
    state = plan.target.filled(leaves, plan.stored_subtrees, "stored")
    return _node(state, plan.target.node)


def _node(state: Any, like: Node) -> Node:
    """Return the tree of nested containers, with those of the target where it has the same names."""
    if not isinstance(state, dict | list | tuple):
        return state
    pairs = state.items() if isinstance(state, dict) else enumerate(state)
    inside = like.children if isinstance(like, Branch) else {}
    children = {str(name): _node(child, inside.get(str(name))) for name, child in pairs}
    if isinstance(like, Branch) and inside.keys() == children.keys():
        return Branch(children, like.container, like.int_keys)
    container = Container.DICT if isinstance(state, dict) else Container(type(state).__name__)
    return Branch(children, container)


def _leaf(plan: TreePlan, leaf: LeafPlan) -> Any:
    """Return a leaf to write; its value is computed when it is written, or now if its shape is unknown."""
    source: Any = leaf.source
    is_stored = isinstance(source, LeafHandle) and source.kind is LeafKind.ARRAY
    if is_stored and leaf.cast is None:
        return stored_trees.to_write(source)
    compute = functools.partial(_compute, plan, leaf)
    if is_stored or (isinstance(source, Derived) and is_array(source)):
        return StoredArray(source.shape, np.dtype(leaf.cast or source.dtype), None, compute)
    value = compute()
    if isinstance(value, KeyData):
        return KeyData(value.impl, stored_trees.in_memory(value.data))
    return StoredArray(value.shape, value.dtype, None, compute) if isinstance(value, np.ndarray) else value


def _compute(plan: TreePlan, leaf: LeafPlan) -> Any:
    """Return the value of a leaf in host memory."""
    host = dataclasses.replace(leaf, sharding=None, slices=None)
    with config.override(mapped=False):
        values, shapes = execute.place(execute.read(dataclasses.replace(plan, leaves=[host])))
    policies.enforce_shapes(plan, shapes)
    value = prng_keys.split_key(values[0])
    if isinstance(value, KeyData):
        return KeyData(value.impl, np.asarray(value.data))
    return np.asarray(value) if hasattr(value, "sharding") else value
