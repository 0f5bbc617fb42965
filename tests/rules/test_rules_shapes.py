"""Rules that take parts of arrays, interpolate them, compute them and turn raw PRNG keys into typed ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flax_ckpt_compat import plan_restore, restore, rules, save
from tests.support.peers import skip_without_typed_keys
from tests.support.stored import Memory, count, same, stored, values


def applied(tree: Any, rule: rules.Rule, target: Any = None) -> dict[str, Any]:
    """The values after a rule."""
    return values(rule.apply(stored(tree), target))


@pytest.mark.parametrize(("number", "axis"), [(0, 0), (2, 1), (-1, -1), (1, -2)])
def test_index_takes_one_and_reads_one(number: int, axis: int) -> None:
    """One index of an axis is numpy's take, and no other value is read."""
    array = count((2, 3, 4), ">f4")
    memory = Memory({"w": array, "b": count((5,))})
    node = rules.index("w", number, axis).apply(memory.tree, None)
    expected = np.take(array, number, axis)
    same({"w": values(node)["w"]}, {"w": expected.astype(array.dtype)})
    assert memory.bytes_read == expected.nbytes + 20


def test_unreplicate() -> None:
    """Every array loses its first axis, of which one row is read; numbers stay."""
    state = {"params": {"w": count((4, 2, 3)), "b": count((4, 3))}, "step": count((4,), np.int32), "epoch": 7}
    memory = Memory(state)
    node = rules.unreplicate().apply(memory.tree, None)
    same(
        values(node),
        {"params/w": state["params"]["w"][0], "params/b": state["params"]["b"][0], "step": np.array(0, np.int32)}
        | {"epoch": 7},
    )
    assert memory.bytes_read == (6 + 3 + 1) * 4


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


@pytest.mark.slow
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


@pytest.mark.parametrize("skip", [0, 1, 2])
def test_resize_a_grid_of_positions(skip: int) -> None:
    """A ViT's positions are a grid on one axis, after tokens that stay."""
    array = count((1, skip + 16, 3))
    found = applied({"pos": array}, rules.resize("pos", (6, 8), axis=1, skip=skip))["pos"]
    np.testing.assert_array_equal(found[:, :skip], array[:, :skip])
    expected = jax.image.resize(array[:, skip:].reshape(1, 4, 4, 3), (1, 6, 8, 3), "linear")
    np.testing.assert_array_equal(found[:, skip:], np.asarray(expected).reshape(1, 48, 3))


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
    assert re.search(r"raised by the function of rules.apply\('w', .*double\): w", str(caught.value.__notes__))


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
