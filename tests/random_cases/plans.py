"""Plans of random restores: ``plan.raises`` is what `restore` raises, and what the plan says comes true."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import jax
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints, open_checkpoint, plan_restore, restore, rules
from flax_ckpt_compat._core.tree import iter_leaves
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat.errors import CheckpointError
from flax_ckpt_compat.transforms import Transform
from tests.random_cases.trees import NAMES, pairs
from tests.support.samples import canonical
from tests.support.saves import use_flag

RULES = st.one_of(
    st.builds(rules.rename, NAMES, NAMES),
    st.builds(rules.drop, NAMES),
    st.builds(rules.from_target, NAMES),
    st.builds(rules.move, NAMES, NAMES),
    st.builds(rules.cast, NAMES, st.sampled_from(["float32", "bfloat16", "int32"])),
    st.builds(rules.rename, st.dictionaries(NAMES, NAMES, min_size=1, max_size=3)),
    st.builds(rules.copy, NAMES, NAMES),
    st.builds(rules.index, NAMES, st.integers(-2, 2), st.integers(-1, 1)),
    st.builds(rules.unreplicate),
    st.builds(rules.resize, NAMES, st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    st.builds(rules.wrap_key_data, NAMES),
    st.builds(rules.key_data, NAMES),
    st.dictionaries(NAMES, NAMES, min_size=1, max_size=2),
)
TRANSFORMS = st.one_of(
    st.none(),
    st.none(),
    st.lists(RULES, min_size=1, max_size=2),
    st.dictionaries(NAMES, st.builds(Transform, original_key=NAMES), max_size=2),
)
_WORDS = st.sampled_from(["error", "warn", "ignore"])
POLICIES = st.fixed_dictionaries(
    {
        "missing_leaves": _WORDS,
        "shape_mismatch": _WORDS,
        "kind_mismatch": _WORDS,
        "dtype": st.sampled_from(["stored", "target"]),
        "structure": st.sampled_from(["flax", "stored"]),
        "transforms": TRANSFORMS,
    }
)
CASES = st.tuples(pairs(), POLICIES, st.booleans())


def check(pair: tuple[Any, Any], options: dict[str, Any], flag: bool) -> None:
    """The plan raises what the restore raises before reading, says the rest, and tells shape, dtype and origin."""
    tree, target = pair
    with TemporaryDirectory() as folder:
        with use_flag(flag):
            checkpoints.save_checkpoint(folder, tree, 1)
        plan: Any = None
        restored: Any = None
        planned = told = None
        try:
            plan = plan_restore(folder, target, **options)
            planned = plan.raises
            assert len(str(plan).splitlines()) < 50
        except CheckpointError as error:
            planned = type(error).__name__
        try:
            restored = restore(folder, target, **options)
        except CheckpointError as error:
            told = type(error).__name__
            assert len(str(error).splitlines()) < 50
        assert planned == told
        if told is None:
            _compare(plan, restored, target)
        if plan is not None and target is not None and options.get("transforms") is None:
            _account(plan, folder)


def _account(plan: Any, folder: str) -> None:
    """Every stored leaf is used, or named as unused, unless a leaf that is missing or kept stands in its place."""
    with open_checkpoint(folder) as view:
        stored = set(view.leaves())
    used = {source for leaf in plan.leaves for source in leaf.sources}
    instead = {*plan.missing, *(leaf.path for leaf in plan.leaves if leaf.origin == "target")}
    for path in stored - used - set(plan.unused):
        assert any(f"{one}/".startswith(f"{path}/") or f"{path}/".startswith(f"{one}/") for one in instead), path


def _compare(plan: Any, restored: Any, target: Any) -> None:
    """What came is what was planned, leaf by leaf, for the leaves that are still where the target has them."""
    found = {"/".join(path): leaf for path, leaf in iter_leaves(state_dict.describe(restored))}
    wanted = {"/".join(path): leaf for path, leaf in iter_leaves(state_dict.describe(target))}
    for leaf in plan.leaves:
        value = found.get(leaf.path)
        if leaf.shape is not None and leaf.origin != "target" and value is not None:
            assert (tuple(value.shape), value.dtype) == (leaf.shape, leaf.dtype), leaf
        if leaf.origin == "target" and not isinstance(wanted.get(leaf.path), jax.ShapeDtypeStruct):
            assert canonical(value) == canonical(wanted.get(leaf.path)), leaf
