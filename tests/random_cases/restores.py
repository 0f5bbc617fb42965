"""Random trees, as users save them, restored into targets that differ here and there.

Both formats against real legacy Flax and against each other; and plans: ``plan.raises`` is what `restore` raises, and
what the plan says comes true."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.training import checkpoints as flax_checkpoints
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints, config, open_checkpoint, plan_restore, restore, rules
from flax_ckpt_compat._core.tree import iter_leaves
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat.errors import CheckpointError
from flax_ckpt_compat.transforms import Transform
from tests.support.samples import Fields, Pair, canonical
from tests.support.saves import use_flag

DTYPES = [np.dtype(one) for one in ("f4", "f8", "i4", "i8", "u1", "?", "c8", ml_dtypes.bfloat16, ml_dtypes.int4)]
NAMES = st.sampled_from(["a", "b", "layer_0", "layer_1", "name", "0", "value"])
SHAPES = st.sampled_from([(), (1,), (2,), (3,), (2, 3), (3, 2), (0,), (2, 0)])


@st.composite
def arrays(draw: Any) -> np.ndarray[Any, Any]:
    """Small arrays of different small numbers."""
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    return (np.arange(np.prod(shape, dtype=int)) + draw(st.integers(0, 3))).reshape(shape).astype(dtype)


LEAVES = st.one_of(
    arrays(),
    arrays().map(lambda array: jnp.asarray(array) if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype else 1),
    st.sampled_from([0, 7, -1, 2**40, 1.5, float("nan"), True, "text", "", None]),
    st.sampled_from([np.float32(2.5), np.int64(3), np.bool_(True)]),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(NAMES, inner, max_size=4),
        st.dictionaries(NAMES, inner, max_size=3).map(flax.core.freeze),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Fields, inner, inner),
    )


TREES = st.dictionaries(NAMES, st.recursive(LEAVES, _nested, max_leaves=6), max_size=4)


def _leaf(draw: Any, leaf: Any) -> Any:
    """A target's leaf for a stored one, mostly of the same shape and dtype."""
    if not isinstance(leaf, np.ndarray | jax.Array):
        return draw(st.one_of(st.just(leaf), st.just(leaf), LEAVES, st.just({})))
    own: Any = np.zeros(leaf.shape, leaf.dtype)
    if draw(st.integers(0, 3)):
        return own
    kind = draw(st.sampled_from(["shape", "dtype", "none", "abstract", "jax", "number", "other"]))
    if kind == "shape":
        return np.zeros(draw(SHAPES), leaf.dtype)
    if kind == "dtype":
        return own.astype(draw(st.sampled_from(DTYPES)))
    if kind == "abstract":
        return jax.ShapeDtypeStruct(leaf.shape, draw(st.sampled_from([leaf.dtype, np.dtype("f4")])))
    if kind == "jax" and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype:
        return jnp.asarray(own)
    return {"none": None, "number": 5}.get(kind, draw(LEAVES))


def _changed(draw: Any, tree: Any) -> Any:
    if isinstance(tree, Pair):
        return Pair(*(_changed(draw, child) for child in tree))
    if isinstance(tree, Fields):
        return Fields(_changed(draw, tree.first), _changed(draw, tree.second))
    if isinstance(tree, list | tuple):
        return type(tree)(_changed(draw, child) for child in tree[: draw(st.sampled_from([9, 9, 9, 1]))])
    if not isinstance(tree, Mapping):
        return _leaf(draw, tree)
    children = {name: _changed(draw, child) for name, child in tree.items() if draw(st.integers(0, 9))}
    if not draw(st.integers(0, 9)):
        children[draw(NAMES)] = draw(LEAVES)
    return flax.core.freeze(children) if isinstance(tree, flax.core.FrozenDict) else children


@st.composite
def pairs(draw: Any) -> tuple[Any, Any]:
    """A tree, and a target: None, or one that was such a tree once."""
    tree = draw(TREES)
    return tree, _changed(draw, tree) if draw(st.integers(0, 9)) else None


POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "missing_leaves": st.sampled_from(["error", "warn", "ignore"]),
        "shape_mismatch": st.sampled_from(["error", "warn", "ignore"]),
        "dtype": st.sampled_from(["stored", "target"]),
    },
)
CASES = st.tuples(pairs(), POLICIES, st.sampled_from([None, None, {}]))


def check(pair: tuple[Any, Any], policies: dict[str, str], transforms: Any) -> None:
    """Both formats give the same, or an error of one class; by default what Flax gives where it gives anything."""
    tree, target = pair
    with TemporaryDirectory() as folder:
        with use_flag(False):
            flax_checkpoints.save_checkpoint(f"{folder}/theirs", tree, 1)
        for name, flag in (("msgpack", False), ("orbax", True)):
            with use_flag(flag):
                checkpoints.save_checkpoint(f"{folder}/{name}", tree, 1)
        with config.override(**policies):
            ours = [outcome(Path(folder, name), target, transforms) for name in ("msgpack", "orbax", "theirs")]
        assert ours[0] == ours[1] == ours[2]
        if transforms is None and not policies and not _is_abstract(target):
            try:
                expected = flax_checkpoints.restore_checkpoint(f"{folder}/theirs", target)
            except Exception:
                return
            assert ours[0] == canonical(expected)


def outcome(path: Path, target: Any, transforms: Any) -> Any:
    """What a restore gives, comparable, or the class of its error; other errors than ours are failures."""
    try:
        return canonical(checkpoints.restore_checkpoint(path, target, orbax_transforms=transforms))
    except CheckpointError as error:
        return type(error).__name__


def _is_abstract(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


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
OPTIONS = st.fixed_dictionaries(
    {
        "missing_leaves": _WORDS,
        "shape_mismatch": _WORDS,
        "kind_mismatch": _WORDS,
        "dtype": st.sampled_from(["stored", "target"]),
        "structure": st.sampled_from(["flax", "stored"]),
        "transforms": TRANSFORMS,
    }
)
PLANS = st.tuples(pairs(), OPTIONS, st.booleans())


def check_plan(pair: tuple[Any, Any], options: dict[str, Any], flag: bool) -> None:
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
