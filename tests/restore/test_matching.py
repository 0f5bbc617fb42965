"""Checkpoint tree + target tree → where each target leaf comes from."""

import types
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat import config, transforms
from flax_ckpt_compat._core.backend import Format, LeafHandle
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import Branch, Node, Path, iter_leaves
from flax_ckpt_compat._restore import match as matching
from flax_ckpt_compat._restore.options import RestoreOptions
from flax_ckpt_compat._restore.plan import TreePlan
from flax_ckpt_compat._restore.transform_spec import TransformSpec
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Own
from tests.support.handles import handles
from tests.support.profiles import examples


def plan(stored: Node, target: Any, *, lenient: bool = False, transform: Any = None) -> TreePlan:
    """The plan of a restore; lenient as with ``orbax_transforms={}``."""
    reader: Any = types.SimpleNamespace(format=Format.MSGPACK, path="/p", places_on_device=False, keeps_lists=True)
    options = RestoreOptions(config.current(), TransformSpec({} if lenient else transform))
    return matching.plan_tree(reader, stored, state_dict.TargetTree(target), options, location_of("/p"))


def match(stored: Any, target: Any, *, lenient: bool = False) -> TreePlan:
    """The plan for two plain trees."""
    return plan(handles(stored), target, lenient=lenient)


NAMES = st.sampled_from("abcd")
TREES = st.recursive(
    st.one_of(st.integers(0, 9), st.integers(0, 3).map(np.zeros), st.none()),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=examples(300), deadline=None)
@given(stored=TREES, target=TREES, lenient=st.booleans())
def test_every_target_leaf_has_one_source(stored: Any, target: Any, lenient: bool) -> None:
    """The plan has the target's leaves in order; kept leaves are the target's, the others are stored there."""
    outcome = match(stored, target, lenient=lenient)
    leaves = {path: leaf for path, leaf in iter_leaves(state_dict.describe(target)) if not isinstance(leaf, Branch)}
    subtrees = outcome.stored_subtrees
    planned = dict.fromkeys([*(leaf.path for leaf in outcome.leaves), *subtrees])
    assert set(planned) == set(leaves) and len(outcome.leaves) >= len(leaves) - len(subtrees)
    assert [path for path in leaves if path not in subtrees] == [path for path in planned if path not in subtrees]
    for leaf in outcome.leaves:
        if leaf.source is Own.KEEP_TARGET:
            assert leaf.target is leaves[leaf.path]
            assert leaf.path in outcome.missing or (lenient and leaf.target is None)
        else:
            assert leaf.path not in outcome.missing
            assert leaf.source is None or leaf.source.path[: len(leaf.path)] == leaf.path


@settings(max_examples=examples(300), deadline=None)
@given(stored=TREES, target=TREES, lenient=st.booleans())
def test_no_stored_leaf_is_lost_in_silence(stored: Any, target: Any, lenient: bool) -> None:
    """Every stored leaf is used, or named as unused, unless a leaf that is missing or None stands in its place."""
    outcome = match(stored, target, lenient=lenient)
    used = {leaf.source.path for leaf in outcome.leaves if isinstance(leaf.source, LeafHandle)}
    stored_paths = {path for path, leaf in iter_leaves(handles(stored)) if isinstance(leaf, LeafHandle)}
    lost = stored_paths - used - set(outcome.unused)
    excused = {*outcome.missing, *_kept_nones(state_dict.describe(target), lenient)}
    assert all(any(path[:n] in excused or any(m[:n] == path for m in excused) for n in range(len(path) + 1))
               for path in lost)  # fmt: skip


def _kept_nones(target: Any, lenient: bool) -> set[Path]:
    return {path for path, leaf in iter_leaves(target) if lenient and leaf is None}


def test_what_is_not_used_is_named() -> None:
    """By its own path: beside the target's names, below a leaf of the target, where the target has a branch."""
    assert match({"a": 1, "b": {"c": 2, "d": None}}, {"a": 0}).unused == [("b", "c"), ("b", "d")]
    assert match({"a": 1}, {"a": {"b": 0}}).unused == [("a",)]
    assert match({"a": None}, {"a": {"b": 0}}).unused == []
    assert match({"a": 1}, {"a": {}}).missing == []
    empty = match({}, {"a": {}})
    assert (empty.missing, empty.empty) == ([("a",)], {("a",)})


def test_what_transforms_use_is_used() -> None:
    """A leaf under its new name is not left over; one that its place in the target took from another one is."""
    transform = transforms.Transform(original_key="old")
    stored = handles({"old": 1, "new": 2, "other": 3})
    renamed = plan(stored, {"new": 0}, transform={"new": transform}).unused
    assert sorted(renamed) == [("new",), ("other",)]
    kept = plan(stored, {"new": 0}, transform={"new": transforms.Transform(use_fallback=True)})
    assert sorted(kept.unused) == [("new",), ("old",), ("other",)]
    assert kept.leaves[0].source is Own.KEEP_TARGET
    assert plan(handles({"a": 1}), {"a": None}, lenient=True).unused == [("a",)]


def test_longer_sequences_differ_unless_transforms_use_the_rest() -> None:
    """Whatever the rest holds, also an entry without leaves; other names beside the indices do not count."""
    for rest in (3, {}, {"x": 1}):
        (difference,) = match({"a": [1, 2, rest]}, {"a": [0, 0]}).kinds
        assert difference.path == ("a",) and "3" in difference.stored and "2" in difference.wanted
    assert match({"a": {"0": 1, "x": 2}}, {"a": [0]}).kinds == []
    used = plan(handles({"a": [1, 2]}), {"a": [0], "b": 0}, transform={"b": transforms.Transform(original_key="a/1")})
    assert used.kinds == []
