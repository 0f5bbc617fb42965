"""Rules that change arrays, one by one or several layers at once: values against numpy, what is read, what stays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat import plan_restore, restore, rules, save
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.tree import Container, KeyData, iter_leaves
from flax_ckpt_compat._trees import leaf_sources, state_dict
from tests.support.peers import skip_without_typed_keys
from tests.support.stored import Memory, applied, count, flat, same, stored, value_of, values
from tests.support.trees import fill

BFLOAT16, INT4 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.int4)
FLOATS = [np.dtype(name) for name in ("f2", "f4", "f8", ">f4")] + [BFLOAT16]
INTS = [np.dtype(name) for name in ("i1", "i4", "u4", ">i8")] + [INT4]
DTYPES = [np.dtype(name) for name in ("f4", ">f4", "i8", "c8", "?", "U3")] + [BFLOAT16, INT4]
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
KEY = KeyData("threefry2x32", np.zeros(2, np.uint32))
OTHERS = {"count": np.int32(3), "step": 4, "name": "adam", "key": KEY, "none": None, "flag": np.array(True)}
STACK = rules.stack(r"layer_(\d+)", "layers")
UNSTACK = rules.unstack("layers", "layer_{}")


@given(SHAPES, st.sampled_from([FLOATS, INTS]).flatmap(lambda kind: st.tuples(*[st.sampled_from(kind)] * 2)))
def test_a_cast_is_numpys(shape: tuple[int, ...], dtypes: Any) -> None:
    """Ints, and floats with infinities and NaN, become what astype makes of them, and what is of another kind stays."""
    old, new = dtypes
    ints, floats = np.arange(np.prod(shape)) % 8, np.linspace(-3, 3, int(np.prod(shape)))
    floats.flat[:3] = [np.inf, -np.inf, np.nan][: floats.size]
    array = (ints if old in INTS else floats).astype(old).reshape(shape)
    others = {name: value for name, value in OTHERS.items() if old in FLOATS or name != "count"}
    after = applied({"params": {"w": array, **others}}, rules.cast("params", new))
    same({"w": after.pop("params/w")}, {"w": array.astype(new)})
    assert after.keys() == {f"params/{name}" for name in others}
    assert all(type(after[f"params/{name}"]) is type(value) for name, value in others.items())


@pytest.mark.parametrize("name", ["int1", "uint1", "int2", "uint4"])
def test_cast_knows_the_narrow_ints(name: str) -> None:
    """Every integer of ml_dtypes is one: it takes ints, and never floats, whose fractions it would drop."""
    if not hasattr(ml_dtypes, name):
        pytest.skip("of a later ml_dtypes")
    zeros = np.zeros(3, np.int32)
    same(applied({"w": zeros}, rules.cast("w", name)), {"w": zeros.astype(getattr(ml_dtypes, name))})
    with pytest.raises(TransformError, match="matches no array of ints"):
        applied({"w": count((2,))}, rules.cast("w", name))


@pytest.mark.parametrize(
    ("array", "dtype", "shown"),
    [
        (np.array([1, 300]), "int8", "300"),
        (np.array([-1]), "uint32", "-1"),
        (np.array([1.0, 1e39]), "float32", "1e\\+39"),
        (np.array([70000], np.float32), "float16", "70000"),
        (np.array([1e39 + 0j]), "complex64", "1e\\+39"),
        (np.array([-1], np.int32), "uint32", "-1"),
        (np.array([2**63], np.uint64), "int64", "9223372036854775808"),
        (np.array([-1], ml_dtypes.int4), "uint4", "-1"),
        # Their largest numbers are 6, 7.5 and 448; only the last has NaN, and none an infinity.
        (np.array([9.0], np.float32), "float4_e2m1fn", "9"),
        (np.array([np.nan], np.float32), "float4_e2m1fn", "nan"),
        (np.array([8.0], np.float32), "float6_e2m3fn", "8"),
        (np.array([-np.inf], np.float32), "float8_e4m3fn", "-inf"),
        (np.array([500], np.float32), "float8_e4m3fn", "500"),
    ],
)
def test_cast_never_wraps(array: Any, dtype: str, shown: str) -> None:
    """A number that the new dtype cannot hold at all is an error when it is read, not another number or infinity."""
    after = rules.cast("w", dtype).apply(stored({"w": array}), None)
    with pytest.raises(TransformError, match=f"w has 1 values.*{shown}"):
        values(after)


def test_cast_rounds_what_is_small() -> None:
    """Below half of the smallest number there is zero: float16 has 2**-24, bfloat16 2**-133."""
    array = np.array([1e-30, 2.0**-24, 2.0**-26, -1e-8])
    assert applied({"w": array}, rules.cast("w", "float16"))["w"].tolist() == [0, 2.0**-24, 0, 0]
    brain = applied({"w": array}, rules.cast("w", "bfloat16"))["w"]
    np.testing.assert_allclose(brain.astype(float), array, rtol=2.0**-8)


@given(SHAPES, st.sampled_from(FLOATS + INTS), st.integers(0, 4), st.integers(0, 7), st.data())
def test_lengths_and_axes_are_numpys(shape: tuple[int, ...], dtype: Any, more: int, value: int, data: Any) -> None:
    """Padded with a constant, cut, axes in any order, flat, split and back: in C order; of a cut its bytes are read."""
    array, rank = fill(shape, dtype, 1), len(shape)
    axis = data.draw(st.integers(-rank, rank - 1))
    at = axis % rank
    pad, back = rules.pad("w", shape[axis] + more, axis, value), rules.cut("w", shape[axis], axis)
    widths = [(0, more if n == at else 0) for n in range(rank)]
    same(applied({"w": array}, pad), {"w": np.pad(array, widths, constant_values=np.asarray(value).astype(dtype))})
    same(applied({"w": array}, pad, back), {"w": array})
    size = data.draw(st.integers(0, shape[axis]))
    reader = Memory({"w": array})
    expected = np.take(array, range(size), axis)
    same(values(rules.cut("w", size, axis).apply(reader.tree, None)), {"w": expected})
    assert reader.bytes_read == expected.nbytes
    axes = data.draw(st.permutations(range(rank)))
    signed = [one - rank * data.draw(st.booleans()) for one in axes]
    same(applied({"w": array}, rules.transpose("w", signed)), {"w": array.transpose(axes).copy(order="C")})
    again = [-1 if n == at else length for n, length in enumerate(shape)]
    same(applied({"w": array}, rules.reshape("w", (-1,))), {"w": array.reshape(-1)})
    same(applied({"w": array}, rules.reshape("w", (-1,)), rules.reshape("w", again)), {"w": array})
    if rank > 1:
        at = data.draw(st.integers(0, rank - 2))
        size = data.draw(st.integers(2, rank - at))
        merged = array.reshape(*shape[:at], -1, *shape[at + size :])
        sizes = [-1 if n == at else length for n, length in enumerate(shape)][at : at + size]
        same(applied({"w": array}, rules.merge_axes("w", at - rank, size)), {"w": merged})
        same(applied({"w": merged}, rules.split_axis("w", sizes, at - merged.ndim)), {"w": array})


def test_pad_from_the_target() -> None:
    """New rows are the target's own, for the parameter and its moments alike; jax and numpy arrays."""
    tree = {"params": {"emb": count((2, 3))}, "mu": {"emb": count((2, 3), start=50)}}
    target = {"params": {"emb": jnp.full((4, 3), -1.0)}, "mu": {"emb": np.zeros((4, 3))}}
    rows = {"params/emb": np.full((2, 3), -1, np.float32), "mu/emb": np.zeros((2, 3), np.float32)}
    expected = {name: np.concatenate([array, rows[name]]) for name, array in flat(tree).items()}
    same(applied(tree, rules.pad("emb", 4, value="target"), target=target), expected)
    found = applied({"w": np.array(["c"])}, rules.pad("w", 2, value="target"), target={"w": np.array(["a", "b"])})
    same(found, {"w": np.array(["c", "b"])})


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        ("f4", 1e300), ("f4", None), ("f4", 1j), ("f4", 10**400), ("f4", [1.0]), ("f4", np.ones(1)),
        ("c8", 1e300), ("c8", 1e300j), ("i4", 1j), ("i4", np.nan), ("i4", None), ("u1", -1), ("?", 2), ("?", 0.5),
        ("f2", 65520), (ml_dtypes.bfloat16, 1e39), (ml_dtypes.int4, 8), (ml_dtypes.float4_e2m1fn, 7.0),
        (ml_dtypes.float4_e2m1fn, np.nan), (ml_dtypes.float8_e4m3fn, np.inf), ("<U3", 0),
    ],
    ids=repr,
)  # fmt: skip
def test_fills_that_do_not_fit(dtype: Any, fill: Any) -> None:
    """A number that the dtype cannot hold, and what is not a number, are errors that name the leaf."""
    with pytest.raises(TransformError, match=r"w is .* does not fit; give a number") as caught:
        applied({"w": np.zeros(2, dtype)}, rules.pad("w", 3, value=fill))
    assert caught.value.leaf == "w"


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        ("f4", np.nan), ("f4", -np.inf), ("f4", 2**70), ("f4", True), ("f2", 65519), ("f4", 1e-60), ("c8", 1j),
        ("c8", np.nan), ("i4", 2.0), ("u8", 2**64 - 1), ("?", True), ("?", 0), (ml_dtypes.bfloat16, jnp.float32(1.5)),
        ("f4", ml_dtypes.bfloat16(2)), (ml_dtypes.float8_e4m3fn, np.nan), (">f4", np.array(0.1)),
        ("f4", np.longdouble(1)),
    ],
    ids=repr,
)  # fmt: skip
def test_fills_that_fit(dtype: Any, fill: Any) -> None:
    """Numbers of Python, numpy and jax become what an assignment in numpy makes of them."""
    expected = np.zeros(3, dtype)
    expected[2] = float(fill) if type(fill) is int and expected.dtype.kind == "f" else np.asarray(fill)
    same(applied({"w": np.zeros(2, dtype)}, rules.pad("w", 3, value=fill)), {"w": expected})


def test_the_targets_values_have_to_fit() -> None:
    """What the target has in the new rows must fit the stored dtype; what it has in the others does not matter."""
    rule = rules.pad("w", 3, value="target")
    assert applied({"w": count((2,))}, rule, target={"w": np.array([1e300, 0, 7])})["w"].tolist() == [0, 1, 7]
    after = rule.apply(stored({"w": count((2,))}), state_dict.describe({"w": np.array([0, 0, 1e300])}))
    with pytest.raises(TransformError, match=r"w: the target's own array has 1 values .*1e\+300"):
        values(after)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (jax.ShapeDtypeStruct((4, 3), np.float32), "a ShapeDtypeStruct"),
        (np.zeros((5, 3), np.float32), r"\[5, 3\], which does not become float32\[4, 3\]"),
        (np.zeros((4, 3), np.int32), "int32"),
        (np.full((4, 3), "a"), r"<U1\[4, 3\], which does not become float32"),
        (3.5, "is a float"),
        (None, "is a NoneType"),
    ],
)
def test_pad_from_a_target_that_does_not_fit(own: Any, message: str) -> None:
    """An abstract leaf, another shape or kind, or no array in the target is an error that names the leaf."""
    with pytest.raises(TransformError, match=message) as caught:
        applied({"emb": count((2, 3))}, rules.pad("emb", 4, value="target"), target={"emb": own})
    assert caught.value.leaf == "emb"


def test_rules_after_rules() -> None:
    """Casting, cutting, padding and turning what was stacked gives what numpy gives."""
    arrays = [count((4, 3), start=10 * n) for n in range(3)]
    steps = (
        rules.stack(r"layer_(\d+)", "layers", axis=1),
        rules.cast("layers", "float64"),
        rules.cut("w", 2),
        rules.pad("w", 5, axis=-1, value=7),
        rules.transpose("w", (2, 0, 1)),
        rules.split("layers", ["a", "b"], axis=1),
        rules.fuse(["b", "a"], "c", axis=1),
        rules.unstack("c", "d{}"),
    )
    expected = np.pad(np.stack(arrays, 1).astype(float)[:2], [(0, 0), (0, 0), (0, 2)], constant_values=7)
    expected = expected.transpose(2, 0, 1)[:, ::-1]
    tree = {f"layer_{n}": {"w": array} for n, array in enumerate(arrays)}
    same(applied(tree, *steps), {f"d{n}/w": expected[n].copy() for n in range(5)})


WHOLE = count((4, 2, 3), ">f4")
# Rule → what becomes of WHOLE, by name; no more is read.
PARTS: list[tuple[rules.Rule, dict[str, Any]]] = [
    *(
        (rules.index("w", number, axis), {"w": np.take(WHOLE, number, axis).astype(WHOLE.dtype)})
        for number, axis in ((0, 0), (2, 2), (-1, -1), (1, -2))
    ),
    (rules.unreplicate(), {"w": WHOLE[0]}),
    (rules.cut("w", 2, -1), {"w": WHOLE[..., :2].copy()}),
    (rules.unstack("w", "w_{}"), {f"w_{n}": WHOLE[n] for n in range(4)}),
    (rules.split("w", ["a", "b"], axis=0), {"a": WHOLE[:2], "b": WHOLE[2:]}),
]


@pytest.mark.parametrize(("rule", "expected"), PARTS, ids=[str(rule) for rule, _ in PARTS])
def test_each_part_reads_its_own_values(rule: rules.Rule, expected: dict[str, Any]) -> None:
    """One part of a stored array reads as many bytes as it has, and is numpy's; numbers stay."""
    reader = Memory({"w": WHOLE, "epoch": 7})
    node = rule.apply(reader.tree, None)
    for path, leaf in iter_leaves(node):
        before = reader.bytes_read
        value = value_of(leaf)
        assert reader.bytes_read - before == getattr(value, "nbytes", 0), path
    same(values(node), {**expected, "epoch": 7})


@pytest.mark.parametrize("flag", [False, True], indirect=True)
def test_unreplicate_what_flax_replicated(flag: bool, tmp_path: Path) -> None:
    """A state that real Flax replicated and saved comes back as its `unreplicate` gives it, typed keys too."""
    skip_without_typed_keys()
    keys = jax.random.split(jax.random.key(3), 2)
    state = {"params": {"w": jnp.arange(6.0)}, "step": jnp.int32(5)}
    copies = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    save(tmp_path / "state", {**copies, "rng": keys}, format="orbax" if flag else "msgpack")
    target = {"params": {"w": np.zeros(6, np.float32)}, "step": np.int32(0), "rng": jax.random.key(0)}
    steps = [rules.unreplicate()]
    assert plan_restore(tmp_path / "state", target, transforms=steps).raises is None
    restored = restore(tmp_path / "state", target, transforms=steps)
    np.testing.assert_array_equal(restored["params"]["w"], state["params"]["w"])
    assert restored["step"] == 5 and restored["step"].dtype == np.int32
    assert restored["rng"].dtype == keys.dtype and bool((restored["rng"] == keys[0]).all())


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        # Every method and every dtype by default; each method with each dtype otherwise.
        pytest.param(method, dtype, marks=() if method == "linear" or dtype is np.float32 else pytest.mark.slow)
        for method in ("nearest", "linear", "cubic", "lanczos3", "lanczos5")
        for dtype in (np.float32, ml_dtypes.bfloat16, np.float16, ">f4")
    ],
)
def test_resize_is_jaxs(method: str, dtype: Any) -> None:
    """Values are those of jax.image.resize in float32, rounded to the stored dtype."""
    array = np.random.default_rng(0).normal(size=(3, 5, 2)).astype(dtype)
    found = applied({"w": array}, rules.resize("w", (6, 4, 2), method))["w"]
    expected = np.asarray(jax.image.resize(array.astype(np.float32), (6, 4, 2), method)).astype(dtype)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, expected)


def test_resize_float64_in_float64() -> None:
    """A linear ramp of doubles is interpolated exactly, without jax's x64."""
    array = np.linspace(0, 1, 5) + 1e-12
    found = applied({"w": array}, rules.resize("w", (9,)))["w"]
    assert found.dtype == np.float64
    at = np.clip((np.arange(9) + 0.5) * 5 / 9 - 0.5, 0, 4)  # centres of pixels
    np.testing.assert_allclose(found, np.interp(at, np.arange(5), array), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("skip", "antialias"), [(0, True), (1, False), (2, True)])
def test_resize_a_grid_of_positions(skip: int, antialias: bool) -> None:
    """A ViT's positions are a grid on one axis, after tokens that stay."""
    array = count((1, skip + 16, 3))
    found = applied({"pos": array}, rules.resize("pos", (6, 3), axis=1, skip=skip, antialias=antialias))["pos"]
    np.testing.assert_array_equal(found[:, :skip], array[:, :skip])
    expected = jax.image.resize(array[:, skip:].reshape(1, 4, 4, 3), (1, 6, 3, 3), "linear", antialias)
    np.testing.assert_array_equal(found[:, skip:], np.asarray(expected).reshape(1, 18, 3))
    assert applied({"pos": array[:0]}, rules.resize("pos", (6, 3), axis=1, skip=skip))["pos"].shape == (0, skip + 18, 3)


def test_resize_leaves_what_has_the_shape() -> None:
    """An array of that shape is not touched."""
    tree = stored({"pos": count((1, 17, 3))})
    assert rules.resize("pos", (4, 4), axis=1, skip=1).apply(tree, None).children["pos"] is tree.children["pos"]


@pytest.mark.parametrize("flag", [False, True], indirect=True)
def test_apply_a_function(flag: bool, tmp_path: Path) -> None:
    """A function computes arrays and numbers; the result is what it returns, and the plan says that it is computed."""
    tree = {"params": {"w": count((2, 3)), "v": count((2, 3))}, "step": 5, "name": "adam"}
    path = save(tmp_path / "x", tree, format="orbax" if flag else "msgpack")
    steps = [rules.apply("w", lambda value: value.mean(axis=0)), rules.apply("step", lambda step: step * 2)]
    target = {"params": {"w": np.zeros(3, np.float32), "v": np.zeros((2, 3), np.float32)}, "step": 0, "name": ""}
    plan = plan_restore(path, target, transforms=steps)
    assert plan.raises is None
    assert [leaf.path for leaf in plan.leaves if leaf.origin == "computed"] == ["params/w", "step"]
    restored = restore(path, target, transforms=steps)
    np.testing.assert_array_equal(restored["params"]["w"], tree["params"]["w"].mean(axis=0))
    np.testing.assert_array_equal(restored["params"]["v"], tree["params"]["v"])
    assert (restored["step"], restored["name"]) == (10, "adam")


def test_apply_cannot_write_to_the_stored_value(tmp_path: Path) -> None:
    """The function's argument is read-only, and its errors say for which leaf they were raised."""

    def double(value: Any) -> Any:
        value *= 2
        return value

    path = save(tmp_path / "x", {"w": count((2,))}, format="msgpack")
    with pytest.raises(ValueError, match="read-only") as caught:
        restore(path, {"w": np.zeros(2, np.float32)}, transforms=[rules.apply("w", double)])
    assert re.search(r"raised by the function of rules.apply\('w', …\), for w", str(caught.value.__notes__))


def test_apply_may_return_its_argument(tmp_path: Path) -> None:
    """What a function returns unchanged is the caller's own, writable, and no other leaf's memory."""
    path = save(tmp_path / "x", {"w": count((2,))}, format="msgpack")
    steps = [rules.copy("w", "v"), rules.apply("[wv]", lambda value: value)]
    restored = restore(path, {"w": np.zeros(2, np.float32), "v": np.zeros(2, np.float32)}, transforms=steps)
    restored["w"] += 1
    np.testing.assert_array_equal(restored["v"], count((2,)))


@pytest.mark.parametrize("flag", [False, True], indirect=True)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_raw_and_typed_keys(flag: bool, impl: str, tmp_path: Path) -> None:
    """Raw keys become typed ones; typed ones become raw; keys of keys keep their shape."""
    skip_without_typed_keys()
    keys = jax.random.split(jax.random.key(7, impl=impl), 3)
    raw = jax.random.key_data(keys)
    save(tmp_path / "raw", {"rng": np.asarray(raw)}, format="orbax" if flag else "msgpack")
    steps = [rules.wrap_key_data("rng", impl)]
    plan = plan_restore(tmp_path / "raw", {"rng": keys}, transforms=steps)
    assert plan.raises is None and not plan.leaves[0].is_reshaped
    for target in ({"rng": keys}, None):
        found = restore(tmp_path / "raw", target, transforms=steps)["rng"]
        assert found.dtype == keys.dtype
        np.testing.assert_array_equal(jax.random.key_data(found), raw)
    path = save(tmp_path / "typed", {"rng": keys}, format="orbax" if flag else "msgpack")
    found = restore(path, {"rng": np.zeros(raw.shape, np.uint32)}, transforms=[rules.key_data("rng")])["rng"]
    np.testing.assert_array_equal(found, raw)


@st.composite
def arrays(draw: Any, ndim: int = 0) -> np.ndarray[Any, Any]:
    """Arrays with at least so many axes."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=3)))
    return count(shape, np.int64).astype(draw(st.sampled_from(DTYPES)))


def layers(arrays_: list[dict[str, Any]], first: int = 0) -> dict[str, Any]:
    """Numbered siblings."""
    return {f"layer_{number}": tree for number, tree in enumerate(arrays_, first)}


@given(st.dictionaries(st.sampled_from("abc"), arrays(), min_size=1), st.integers(1, 12), st.data())
def test_stack_is_numpys(tree: dict[str, Any], number: int, data: Any) -> None:
    """Each array of the stack is np.stack of the layers', in the order of their numbers; unstacked, all are back."""
    first = data.draw(st.sampled_from([0, 1, 7]))
    least = min(array.ndim for array in tree.values())
    axis = data.draw(st.integers(-least - 1, least))
    all_layers = [{name: np.roll(array, shift) for name, array in tree.items()} for shift in range(number)]
    mixed = dict(data.draw(st.permutations(list(layers(all_layers, first).items()))))
    stacked = {
        name: np.stack([layer[name] for layer in all_layers], axis).astype(array.dtype, order="C")
        for name, array in tree.items()
    }
    whole = {"x": {"layers": stacked}}
    stack = rules.stack(r"layer_(\d+)", "layers", axis, first)
    unstack = rules.unstack("layers", "layer_{}", axis, first)
    same(applied({"x": mixed}, stack), flat(whole))
    same(applied({"x": mixed}, stack, unstack), flat({"x": layers(all_layers, first)}))
    same(applied(whole, unstack), flat({"x": layers(all_layers, first)}))
    same(applied(whole, unstack, stack), flat(whole))


@given(arrays(1), st.data())
def test_split_is_numpys(array: Any, data: Any) -> None:
    """Each part is what np.split gives, and fuse puts the parts together again."""
    axis = data.draw(st.integers(-array.ndim, array.ndim - 1))
    length = array.shape[axis]
    cuts = sorted(data.draw(st.lists(st.integers(0, length), min_size=1, max_size=3)))
    sizes = np.diff([0, *cuts, length]).tolist()
    into = [f"p{number}" for number in range(len(sizes))]
    split, fuse = rules.split("w", into, axis, sizes), rules.fuse(into, "w", axis)
    expected = [part.copy() for part in np.split(array, cuts, axis)]
    same(applied({"w": array}, split), dict(zip(into, expected, strict=True)))
    same(applied({"w": array}, split, fuse), {"w": array})


def test_equal_parts() -> None:
    """Without sizes the parts are equal, in every leaf of a subtree and wherever the name occurs."""
    dense = {"kernel": count((4, 6)), "bias": count((6,))}
    tree = {"params": {"att": {"qkv": dense}}, "mu": {"att": {"qkv": dense}}}
    parts = {
        n: {leaf: array[..., 2 * at : 2 * at + 2].copy() for leaf, array in dense.items()} for at, n in enumerate("qkv")
    }
    same(applied(tree, rules.split("qkv", ["q", "k", "v"])), flat({"params": {"att": parts}, "mu": {"att": parts}}))


def test_everywhere_with_neighbours() -> None:
    """Layers are stacked in params and moments, each by themselves, below several levels; neighbours stay."""
    block = {"w": count((2,))}
    tree = {
        "params": {"enc": {**layers([block] * 3), "norm": count((1,))}, "dec": layers([block] * 2)},
        "opt_state": {"0": {"mu": {"enc": layers([block] * 3)}, "count": np.int32(4)}},
    }
    after = applied(tree, rules.stack(r"layer_(\d+)", "layers/cell"))
    assert {name: value.shape for name, value in after.items()} == {
        "params/enc/layers/cell/w": (3, 2),
        "params/enc/norm": (1,),
        "params/dec/layers/cell/w": (2, 2),
        "opt_state/0/mu/enc/layers/cell/w": (3, 2),
        "opt_state/0/count": (),
    }
    back = rules.unstack("layers/cell", "layer_{}")
    assert applied(tree, rules.stack(r"layer_(\d+)", "layers/cell"), back).keys() == flat(tree).keys()


def test_scalars_stack() -> None:
    """Numpy scalars and arrays without axes become a vector."""
    found = applied({"l0": np.float32(1), "l1": np.float32(2)}, rules.stack(r"l(\d)", "l"))
    same(found, {"l": np.array([1, 2], np.float32)})


def test_what_holds_no_value_stays() -> None:
    """None, empty subtrees and leaves left to the target need no stacking, and no cutting."""
    tree = stored(layers([{"w": count((2,)), "none": None, "empty": {}}] * 2))
    for node in tree.children.values():
        node.children["own"] = leaf_sources.Own.KEEP_TARGET
    after = STACK.apply(tree, None)
    found, own = values(after), leaf_sources.Own.KEEP_TARGET
    assert (found["layers/none"], found["layers/empty"], found["layers/own"]) == (None, {}, own)
    assert values(UNSTACK.apply(after, None))["layer_1/own"] is own
    assert values(rules.cast("layers", "float16").apply(after, None))["layers/own"] is own


def test_pieces_are_memory_of_their_own() -> None:
    """Writing to one piece changes no other, also where they were computed."""
    before = stored(layers([{"w": count((2,))}] * 2))
    stacked = rules.stack(r"layer_(\d+)", "x").apply(before, None).children["x"].children["w"]
    whole = value_of(stacked)
    for rule in (rules.unstack("x", "x_{}"), rules.split("x", ["a", "b"])):
        tree = rule.apply(rules.stack(r"layer_(\d+)", "x").apply(before, None), None)
        for _, leaf in iter_leaves(tree):
            assert isinstance(leaf.inputs[0], leaf_sources.Derived)
            assert not np.shares_memory(leaf.function(whole), whole)


def test_what_is_joined_keeps_its_container() -> None:
    """A subtree whose keys are ints has them again, where a restore gives ints back; a namedtuple keeps its class."""
    for rule in (rules.stack(r"l_(\d)", "l"), rules.fuse(["l_0", "l_1"], "l"), rules.rename("l_0", "l")):
        whole = stored({f"l_{n}": {"0": count((2,)), "1": {"x": count((3,))}} for n in range(2)})
        for layer in whole.children.values():
            layer.int_keys = frozenset({"0", "1"})
            layer.children["1"].container, layer.children["1"].type_name = Container.NAMEDTUPLE, "module.Pair"
        after = rule.apply(whole, None).children["l"]
        assert after.int_keys == {"0", "1"}
        assert (after.children["1"].container, after.children["1"].type_name) == (Container.NAMEDTUPLE, "module.Pair")
