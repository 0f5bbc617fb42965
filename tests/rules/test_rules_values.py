"""Rules that change arrays one by one: values against numpy, what is left alone, what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat import rules
from flax_ckpt_compat._core.errors import TransformError
from flax_ckpt_compat._core.tree import KeyData
from flax_ckpt_compat._trees import leaf_sources, state_dict
from tests.support.stored import Memory, count, same, stored, value_of, values
from tests.support.trees import fill

FLOATS = [np.dtype(name) for name in ("f2", "f4", "f8", ">f4")] + [np.dtype(ml_dtypes.bfloat16)]
INTS = [np.dtype(name) for name in ("i1", "i4", "u4", ">i8")] + [np.dtype(ml_dtypes.int4)]
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
KEY = KeyData("threefry2x32", np.zeros(2, np.uint32))
OTHERS = {"count": np.int32(3), "step": 4, "name": "adam", "key": KEY, "none": None, "flag": np.array(True)}


@given(SHAPES, st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_cast_floats_is_numpys(shape: tuple[int, ...], old: Any, new: Any) -> None:
    """Floats of any dtype become what astype makes of them, and nothing else does."""
    array = np.linspace(-3, 3, int(np.prod(shape))).astype(old).reshape(shape)
    after = values(rules.cast("params", new).apply(stored({"params": {"w": array, **OTHERS}}), None))
    same({"w": after.pop("params/w")}, {"w": array.astype(new)})
    assert after.keys() == {f"params/{name}" for name in OTHERS}
    assert all(type(after[f"params/{name}"]) is type(value) for name, value in OTHERS.items())


@given(SHAPES, st.sampled_from(INTS), st.sampled_from(INTS))
def test_cast_ints_is_numpys(shape: tuple[int, ...], old: Any, new: Any) -> None:
    """Ints that fit become what astype makes of them."""
    array = (np.arange(np.prod(shape)) % 8).astype(old).reshape(shape)
    same(values(rules.cast("w", new).apply(stored({"w": array}), None)), {"w": array.astype(new)})


@pytest.mark.parametrize("name", ["int1", "uint1", "int2", "uint4"])
def test_cast_knows_the_narrow_ints(name: str) -> None:
    """Every integer of ml_dtypes is one: it takes ints, and never floats, whose fractions it would drop."""
    if not hasattr(ml_dtypes, name):
        pytest.skip("of a later ml_dtypes")
    zeros = np.zeros(3, np.int32)
    same(values(rules.cast("w", name).apply(stored({"w": zeros}), None)), {"w": zeros.astype(getattr(ml_dtypes, name))})
    with pytest.raises(TransformError, match="matches no array of ints"):
        rules.cast("w", name).apply(stored({"w": count((2,))}), None)


def test_cast_says_how() -> None:
    """The new leaf has the new dtype before anything is read, and says what is done; a leaf that has it stays."""
    tree = stored({"w": count((3,)), "v": count((3,), ml_dtypes.bfloat16)})
    after = rules.cast("[wv]", "bfloat16").apply(tree, None)
    assert after.children["w"].how == "float32 → bfloat16"
    assert after.children["w"].dtype == ml_dtypes.bfloat16
    assert after.children["v"] is tree.children["v"]


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
        value_of(after.children["w"])


def test_cast_keeps_what_is_not_finite() -> None:
    """Infinities and NaN stay what they are."""
    array = np.array([np.inf, -np.inf, np.nan])
    after = rules.cast("w", "bfloat16").apply(stored({"w": array}), None)
    np.testing.assert_array_equal(value_of(after.children["w"]).astype(float), array)


def test_cast_rounds_what_is_small() -> None:
    """Below half of the smallest number there is zero: float16 has 2**-24, bfloat16 2**-133."""
    array = np.array([1e-30, 2.0**-24, 2.0**-26, -1e-8])
    half = value_of(rules.cast("w", "float16").apply(stored({"w": array}), None).children["w"])
    assert half.tolist() == [0, 2.0**-24, 0, 0]
    brain = value_of(rules.cast("w", "bfloat16").apply(stored({"w": array}), None).children["w"])
    np.testing.assert_allclose(brain.astype(float), array, rtol=2.0**-8)


@given(SHAPES, st.sampled_from(FLOATS + INTS), st.integers(0, 4), st.integers(0, 7), st.data())
def test_pad_is_numpys(shape: tuple[int, ...], dtype: Any, more: int, value: int, data: Any) -> None:
    """Padded arrays are those of np.pad with a constant; pad and cut give the array back."""
    array = fill(shape, dtype, 1)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    size = shape[axis] + more
    there = rules.pad("w", size, axis, value).apply(stored({"w": array}), None)
    widths = [(0, more if n == axis % len(shape) else 0) for n in range(len(shape))]
    expected = np.pad(array, widths, constant_values=np.asarray(value).astype(dtype))
    same(values(there), {"w": expected})
    same(values(rules.cut("w", shape[axis], axis).apply(there, None)), {"w": array})


@given(SHAPES, st.data())
def test_cut_is_numpys(shape: tuple[int, ...], data: Any) -> None:
    """The first values on the axis, of which alone the bytes are read."""
    array = count(shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    size = data.draw(st.integers(0, shape[axis]))
    reader = Memory({"w": array})
    found = values(rules.cut("w", size, axis).apply(reader.tree, None))
    expected = np.take(array, range(size), axis)
    same(found, {"w": expected})
    assert reader.bytes_read == expected.nbytes


def test_pad_from_the_target() -> None:
    """New rows are the target's own, for the parameter and its moments alike; jax and numpy arrays."""
    tree = {"params": {"emb": count((2, 3))}, "mu": {"emb": count((2, 3), start=50)}}
    target = {"params": {"emb": jnp.full((4, 3), -1.0)}, "mu": {"emb": np.zeros((4, 3))}}
    after = rules.pad("emb", 4, value="target").apply(stored(tree), state_dict.describe(target))
    found = values(after)
    np.testing.assert_array_equal(found["params/emb"][:2], tree["params"]["emb"])
    np.testing.assert_array_equal(found["params/emb"][2:], -1)
    np.testing.assert_array_equal(found["mu/emb"][2:], 0)
    assert found["mu/emb"].dtype == np.float32
    words = state_dict.describe({"w": np.array(["a", "b"])})
    same(
        values(rules.pad("w", 2, value="target").apply(stored({"w": np.array(["c"])}), words)),
        {"w": np.array(["c", "b"])},
    )


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
    tree = stored({"w": np.zeros(2, dtype)})
    with pytest.raises(TransformError, match=r"w is .* does not fit; give a number") as caught:
        rules.pad("w", 3, value=fill).apply(tree, None)
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
    same(values(rules.pad("w", 3, value=fill).apply(stored({"w": np.zeros(2, dtype)}), None)), {"w": expected})


def test_the_targets_values_have_to_fit() -> None:
    """What the target has in the new rows must fit the stored dtype; what it has in the others does not matter."""
    rule = rules.pad("w", 3, value="target")
    for own, is_new in ((np.array([1e300, 0, 7]), False), (np.array([0, 0, 1e300]), True)):
        after = rule.apply(stored({"w": count((2,))}), state_dict.describe({"w": own}))
        if is_new:
            with pytest.raises(TransformError, match=r"w: the target's own array has 1 values .*1e\+300"):
                value_of(after.children["w"])
        else:
            assert value_of(after.children["w"]).tolist() == [0, 1, 7]
    with pytest.raises(TransformError, match="does not become bool"):
        rule.apply(stored({"w": np.ones(2, bool)}), state_dict.describe({"w": np.array(["a", "b", "c"])}))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (jax.ShapeDtypeStruct((4, 3), np.float32), "abstract"),
        (np.zeros((5, 3), np.float32), r"\(5, 3\), expected \(4, 3\)"),
        (np.zeros((4, 3), np.int32), "int32"),
        (3.5, "is not an array"),
        (None, "is not an array"),
    ],
)
def test_pad_from_a_target_that_does_not_fit(own: Any, message: str) -> None:
    """An abstract leaf, another shape or kind, or no array in the target is an error that names the leaf."""
    with pytest.raises(TransformError, match=message) as caught:
        rules.pad("emb", 4, value="target").apply(stored({"emb": count((2, 3))}), state_dict.describe({"emb": own}))
    assert caught.value.leaf == "emb"


@given(SHAPES, st.data())
def test_transpose_is_numpys(shape: tuple[int, ...], data: Any) -> None:
    """Any order of axes, counted from the front or the end."""
    array = count(shape)
    axes = data.draw(st.permutations(range(len(shape))))
    signed = [axis - len(shape) * data.draw(st.booleans()) for axis in axes]
    found = values(rules.transpose("w", signed).apply(stored({"w": array}), None))
    same(found, {"w": array.transpose(axes).copy(order="C")})


@given(SHAPES, st.data())
def test_reshape_is_numpys(shape: tuple[int, ...], data: Any) -> None:
    """Flat and back, with a length left open; the values are in C order."""
    array = count(shape)
    flat = rules.reshape("w", (-1,)).apply(stored({"w": array}), None)
    same(values(flat), {"w": array.reshape(-1)})
    open_at = data.draw(st.integers(0, len(shape) - 1))
    again = [-1 if n == open_at else size for n, size in enumerate(shape)]
    same(values(rules.reshape("w", again).apply(flat, None)), {"w": array})


def test_rules_after_rules() -> None:
    """Casting, cutting, padding and turning what was stacked gives what numpy gives."""
    arrays = [count((4, 3), start=10 * n) for n in range(3)]
    tree: Any = stored({f"layer_{n}": {"w": array} for n, array in enumerate(arrays)})
    for rule in (
        rules.stack(r"layer_(\d+)", "layers", axis=1),
        rules.cast("layers", "float64"),
        rules.cut("w", 2),
        rules.pad("w", 5, axis=-1, value=7),
        rules.transpose("w", (2, 0, 1)),
        rules.split("layers", ["a", "b"], axis=1),
        rules.fuse(["b", "a"], "c", axis=1),
        rules.unstack("c", "d{}"),
    ):
        tree = rule.apply(tree, None)
    expected = np.pad(np.stack(arrays, 1).astype(float)[:2], [(0, 0), (0, 0), (0, 2)], constant_values=7)
    expected = expected.transpose(2, 0, 1)[:, ::-1]
    same(values(tree), {f"d{n}/w": expected[n].copy() for n in range(5)})


def test_own_leaves_are_left_alone() -> None:
    """Leaves left to the target have no values to change."""
    tree = stored({"w": count((2,))})
    tree.children["v"] = leaf_sources.Own.KEEP_TARGET
    assert rules.cast("[wv]", "float16").apply(tree, None).children["v"] is leaf_sources.Own.KEEP_TARGET
