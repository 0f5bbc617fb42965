"""Match a checkpoint's tree with a target: plan where each leaf of the target comes from. Reads no array data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import KIND_OF_TYPE, LeafHandle, LeafKind, Reader
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Branch, Container, Node, Path, iter_leaves, node_at
from flax_ckpt_compat._restore import leaf_kinds
from flax_ckpt_compat._restore.leaf_plans import LeafPlanner
from flax_ckpt_compat._restore.plan import LeafPlan, RestoreOptions, TreePlan
from flax_ckpt_compat._trees import prng_keys, state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, Own, handles_of, is_array
from flax_ckpt_compat._trees.old_namedtuples import fields_of

_ABSENT: Any = object()  # in place of a stored node: the checkpoint has none
_ARRAY, _DICT = LeafKind.ARRAY, Container.DICT
# The dtype of PRNG key data. Compared by identity, which is fast: numpy has one object for each native dtype.
_KEY_DATA = np.dtype(np.uint32)


def plan_tree(
    reader: Reader,
    tree: Node,
    target: state_dict.TargetTree | None,
    options: RestoreOptions,
    location: Location,
    *,
    leaf_by_leaf: bool = False,
) -> TreePlan:
    """Plan a restore of one tree, or of a part of it, after the rules.

    With ``leaf_by_leaf``, match leaves below nodes with custom serialization, too, which take any stored structure."""
    plan = TreePlan(location, reader, options, target, tree)
    with memory.pause_gc():
        planner = _Planner(plan, frozenset() if target is None or leaf_by_leaf else target.custom_paths)
        if target is None:
            plan.stored_subtrees[()] = tree
            for leaf_path, leaf in iter_leaves(tree):
                planner.take(leaf, None, leaf_path)
        else:
            planner.node(tree, target.node, ())
            planner.finish()
    return plan


class _Planner:
    """Planner of the leaves of a target, in its order."""

    def __init__(self, plan: TreePlan, custom_paths: frozenset[Path]):
        self._plan, self._custom_paths = plan, custom_paths
        self._dataclasses = frozenset[Path]() if plan.target is None else plan.target.dataclass_paths
        self._leaf_planner = LeafPlanner(plan)
        self._casts = plan.options.casts
        self._lenient = plan.options.transforms.orbax_semantics
        self._choose = None if plan.target is None else plan.options.transforms.chooser(plan.tree)
        # Stored leaves that transforms take for some leaf of the target.
        self._chosen: set[LeafHandle] = set()
        # Sequences, namedtuples and dataclasses of the target with fewer entries or fields than stored.
        self._larger: list[tuple[Path, Mapping[str, Node], Branch]] = []

    def node(self, stored: Node, target: Node, path: Path) -> None:
        if not isinstance(target, Branch):
            self.leaf(stored, target, path)
        elif stored is Own.KEEP_TARGET:
            for rest, leaf in iter_leaves(target):
                if not isinstance(leaf, Branch):
                    self.keep(leaf, (*path, *rest), "from_target")
        elif isinstance(stored, Branch):
            self.branch(stored, target, path)
        else:
            self.note_unused(stored, path)
            if target.children:
                self.absent(target, path)

    def branch(self, stored: Branch, target: Branch, path: Path) -> None:
        fields = fields_of(stored, target)
        if self._choose is None and path in self._custom_paths and not _same_names(stored, target):
            self.take_subtree(stored, path, target)
            return
        if not fields.keys() <= target.children.keys():
            for name, child in fields.items():
                if name not in target.children:
                    self.note_unused(child, (*path, name))
            if target.container is not _DICT or path in self._dataclasses:
                self._larger.append((path, fields, target))
        # A loop that calls itself, because Flax's own functions nest no fewer than three calls for a level, and what
        # Flax restores within the recursion limit is restored here.
        plan_array, add = self._leaf_planner.array, self._plan.leaves.append
        host_types = self._leaf_planner.host_types
        for name, child in target.children.items():
            found = fields.get(name, _ABSENT)
            # As almost all leaves are: an array where the target has one of the same shape.
            if (
                type(found) is LeafHandle
                and found.kind is _ARRAY
                and getattr(child, "shape", None) == found.shape
                and found.dtype is not _KEY_DATA
                and self._choose is None
            ):
                if type(child) in host_types and not (found.possible_kinds or found.in_gda_folder):
                    add(LeafPlan((*path, name), found, child, True))
                else:
                    add(plan_array((*path, name), found, child))
            elif isinstance(found, Branch) and type(child) is Branch:
                self.branch(found, child, (*path, name))
            elif (
                type(found) is LeafHandle
                and KIND_OF_TYPE.get(type(child)) is found.kind
                and not found.possible_kinds
                and self._choose is None
            ):
                add(LeafPlan((*path, name), found, child, True))
            elif found is _ABSENT and type(child) is Branch:
                self.absent(child, (*path, name))
            else:
                self.node(found, child, (*path, name))

    def absent(self, target: Branch, path: Path) -> None:
        """Plan a branch that the checkpoint lacks: transforms may give leaves of it."""
        if not target.children:
            self._plan.missing.append(path)
            self._plan.empty.add(path)
        for name, child in target.children.items():
            if isinstance(child, Branch):
                self.absent(child, (*path, name))
            else:
                self.leaf(_ABSENT, child, (*path, name))

    def leaf(self, stored: Node, target: Any, path: Path) -> None:
        if target is ...:  # Orbax's PLACEHOLDER
            self.keep(target, path, "... in the target: not read")
            return
        if stored is Own.KEEP_TARGET:
            self.keep(target, path, "from_target")
            return
        if self._lenient and target is None:
            self.note_unused(stored, path)
            self.keep(None, path, "None in the target")
            return
        chosen = self._choose(path, target) if self._choose is not None else None
        if chosen is Own.KEEP_TARGET:
            self.note_unused(stored, path)
            self.keep(target, path, "as the transforms say")
        elif chosen is not None:
            self.note_unused(stored, path)
            self._chosen.update(handles_of(chosen))
            self.take(chosen, self.compare(chosen, target, path), path)
        elif stored is _ABSENT or (self._lenient and (stored is None or isinstance(stored, Branch))):
            self.note_unused(stored, path)
            self._plan.missing.append(path)
            self.keep(target, path, "not in the checkpoint")
        elif isinstance(stored, Branch):
            self.compare(stored, target, path)
            self.take_subtree(stored, path)
        else:
            self.take(stored, self.compare(stored, target, path), path)

    def keep(self, target: Any, path: Path, why: str) -> None:
        self._plan.leaves.append(LeafPlan(path, Own.KEEP_TARGET, target, why=why))

    def take_subtree(self, stored: Branch, path: Path, target: Node = None) -> None:
        """Plan a stored branch as it is, for a target that takes any structure."""
        self._plan.stored_subtrees[path] = stored
        before = len(self._plan.leaves)
        for rest, leaf in iter_leaves(stored):
            if leaf is Own.KEEP_TARGET:
                self.keep(node_at(target, rest), (*path, *rest), "from_target")
            else:
                self.take(leaf, None, (*path, *rest))
        if target is not None:
            for one in self._plan.leaves[before:]:
                one.why = one.why or "by the rules of the target's own type, or leaf by leaf if they refuse it"

    def take(self, stored: Any, target: Any, path: Path) -> None:
        """Plan a stored or derived leaf."""
        if type(stored) is LeafHandle:
            is_value = stored.dtype is None and stored.kind is not LeafKind.UNSUPPORTED
            if target is None and (stored.kind is _ARRAY or is_value) and not stored.possible_kinds:  # as it is
                self._plan.leaves.append(LeafPlan(path, stored, None, True))
                return
            plan_leaf = self._leaf_planner.array if stored.kind is _ARRAY else self._leaf_planner.stored
            self._plan.leaves.append(plan_leaf(path, stored, target))
        elif isinstance(stored, Derived):
            self._plan.leaves.append(self._leaf_planner.derived(path, stored, target))
        elif isinstance(stored, dict | list):  # decoded numbers, which are given as they are
            self._plan.leaves.append(LeafPlan(path, Own.KEEP_TARGET, stored))
        elif not isinstance(stored, Branch):  # one without children
            self._plan.leaves.append(LeafPlan(path, stored, target))

    def compare(self, stored: Node, target: Any, path: Path) -> Any:
        """Record a shape, or else a kind, that is not the target's. Return the target, or None if it is not a leaf."""
        shape = getattr(target, "shape", None)
        if isinstance(shape, tuple) and hasattr(target, "dtype"):
            was = _shape_of(stored, target, self._casts)
            if was is not None and was != shape:
                self._plan.shapes.append((path, was, shape))
                return target
        difference = leaf_kinds.difference_at(path, stored, target, self._casts)
        if difference is None:
            return target
        self._plan.kinds.append(difference)
        return target if isinstance(stored, LeafHandle | Derived) and difference.is_leaf else None

    def note_unused(self, stored: Node, path: Path) -> None:
        """Record the stored leaves below a node as unused."""
        if stored is not None and stored is not _ABSENT:
            self._plan.unused.extend((*path, *rest) for rest, _ in iter_leaves(stored))

    def finish(self) -> None:
        """Record stored entries and fields that the target lacks; leaves that transforms take are not left over."""
        plan, chosen = self._plan, self._chosen
        for path, fields, target in self._larger:
            is_sequence = target.container.is_sequence
            left = [name for name in fields if name not in target.children and (name.isdecimal() or not is_sequence)]
            leaves = [leaf for name in left for _, leaf in iter_leaves(fields[name])]
            if not left or all(isinstance(leaf, LeafHandle) and leaf in chosen for leaf in leaves):
                continue
            if is_sequence:
                plan.kinds.append(leaf_kinds.longer_sequence(path, len(fields), len(target.children)))
            elif target.children and any(isinstance(leaf, LeafHandle) and leaf not in chosen for leaf in leaves):
                plan.kinds.append(leaf_kinds.other_type(path, list(fields), left))
        if chosen:
            used = {path for path, leaf in iter_leaves(plan.tree) if isinstance(leaf, LeafHandle) and leaf in chosen}
            plan.unused = [path for path in plan.unused if path not in used]


def _shape_of(stored: Any, target: Any, casts: bool) -> tuple[int, ...] | None:
    """Return the stored shape to compare with a target's array, or None; of keys for an array that of their data."""
    if isinstance(stored, LeafHandle) and stored.kind is LeafKind.PRNG_KEY:
        return stored.shape[:-1] if prng_keys.is_prng_key(target) else stored.shape
    if isinstance(stored, LeafHandle) and stored.kind in leaf_kinds.PYTHON_NUMBERS:
        takes_shape = isinstance(target, np.ndarray | jax.Array | jax.ShapeDtypeStruct)
        return () if takes_shape and leaf_kinds.becomes_array(target, casts) else None
    return stored.shape if isinstance(stored, Derived) or is_array(stored) else None


def _same_names(stored: Node, target: Node) -> bool:
    if not isinstance(stored, Branch) or not isinstance(target, Branch):
        return not isinstance(stored, Branch) and not (isinstance(target, Branch) and target.children)
    return stored.children.keys() == target.children.keys() and all(
        _same_names(stored.children[name], child) for name, child in target.children.items()
    )
