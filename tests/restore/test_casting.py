"""Casts while reading: what numpy makes of the values, and only a little of them in two dtypes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, config, restore, rules, transforms
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle
from flax_ckpt_compat._core.tree import iter_leaves
from flax_ckpt_compat._restore import casting
from tests.support.saves import use_flag
from tests.support.stored import Memory

VALUES = {f"l{n}": np.linspace(-n, n, 100 + n, dtype=np.float32).reshape(2, -1) for n in range(0, 20, 2)}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.int8, np.complex64, np.float32])
def test_values_are_those_of_numpy(
    dtype: Any, mapped: bool, compression: str | None, flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is read together, every array is cast as numpy casts it, and is writable memory of its own."""
    monkeypatch.setattr(casting, "_AT_ONCE", 1000)
    with use_flag(flag), config.override(compression=compression, dtype="target", mapped=mapped):
        path = checkpoints.save_checkpoint(tmp_path, VALUES, 1)
        target = {name: np.zeros(array.shape, dtype) for name, array in VALUES.items()}
        restored = checkpoints.restore_checkpoint(path, target)
    for name, array in VALUES.items():
        assert restored[name].dtype == dtype and restored[name].flags.writeable
        np.testing.assert_array_equal(restored[name], array.astype(dtype))


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(np.complex64, [1.5 - 2j, -3 + 4j]), (np.complex128, [1.5 - 2j, -3 + 4j]), (np.float16, [1.5, -3])],
)
def test_complex_values(wanted: Any, expected: list[complex], flag: bool, tmp_path: Path) -> None:
    """A wider or narrower complex dtype keeps both parts, a real one the real part."""
    tree = {"a": np.array([1.5 - 2j, -3 + 4j], np.complex64), "b": np.array([1.5 - 2j, -3 + 4j], np.complex128)}
    with use_flag(flag), config.override(dtype="target"):
        path = checkpoints.save_checkpoint(tmp_path, tree, 1)
        restored = checkpoints.restore_checkpoint(path, {name: np.zeros(2, wanted) for name in tree})
    for value in restored.values():
        assert (value.dtype, value.tolist()) == (wanted, expected)


def test_what_complex_values_lose() -> None:
    """Imaginary parts to real dtypes, but for zeros; range in either part to a narrower complex dtype."""
    wide, small, real = np.dtype(np.complex128), np.dtype(np.complex64), np.dtype(np.float64)
    assert casting.is_lossy(np.array([1 + 2j], wide), real)
    assert not casting.is_lossy(np.array([1 + 0j], wide), real)
    assert casting.is_lossy(np.array([1e300 + 0j], wide), np.dtype(np.float32))
    for value, lost in ((1 + 2j, False), (1e300 + 1j, True), (1 + 1e300j, True)):
        assert casting.is_lossy(np.array([value], wide), small) is lost
    cast = casting.Cast(real, is_checked=True)
    for array in (np.array([1j], wide), np.array([2 + 0j], wide)):
        cast(array)
    assert cast.is_lossy  # of the first, whatever the others lose


def test_what_integers_lose() -> None:
    """Values beyond the range of the new dtype, and what it rounds: float64 holds all up to 2**53 (IEEE 754)."""
    for value, lost in ((2**53, False), (2**53 + 1, True), (2**53 + 2, False), (-(2**53) - 1, True), (2**63 - 1, True)):
        for dtype in (np.float64, np.complex128):
            assert casting.is_lossy(np.array([value], np.int64), np.dtype(dtype)) is lost
    for value, lost in ((-129, True), (-128, False), (127, False), (128, True)):
        assert casting.is_lossy(np.array([value], np.int64), np.dtype(np.int8)) is lost
    # The largest float16 is 65504: up to half a step above it, values round to it.
    for value, lost in ((65510.0, False), (65536.0, True), (-65536.0, True)):
        assert casting.is_lossy(np.array([value], np.float32), np.dtype(np.float16)) is lost
    for dtype in (np.float16, np.float64):  # the least int32 is beyond float16, and comes back as infinity
        assert casting.is_lossy(np.array([-np.inf], dtype), np.dtype(np.int32))


def test_which_casts_exist() -> None:
    """Between numbers of any kind, and within a kind of what are not numbers; to a typed key there is none."""
    assert casting.exists(np.dtype(np.int8), np.dtype(jnp.bfloat16))
    assert casting.exists(np.dtype("U3"), np.dtype("U5"))
    assert not casting.exists(np.dtype("U3"), np.dtype(np.int8))
    assert not casting.exists(np.dtype(np.uint32), jax.random.key(0).dtype)


def test_slices_of_one_array_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much they are: they may share chunks."""
    monkeypatch.setattr(casting, "_AT_ONCE", 1000)
    (a, b) = (leaf for _, leaf in iter_leaves(Memory({"a": np.ones(400), "b": np.ones(4)}).tree))
    slices = [ArraySlice(a, (slice(start, start + 100),)) for start in range(0, 400, 100)]
    assert list(casting._batches([*slices, b])) == [slices, [b]]


def test_little_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays to cast are read in batches of little memory, or alone; the others all together."""
    monkeypatch.setattr(casting, "_AT_ONCE", 1000)
    batches: list[int] = []
    reader = Memory({**VALUES, "huge": np.ones(5000, np.float32), "kept": np.ones(9000, np.float32)})
    read = reader.read

    def count(wanted: Sequence[Any]) -> list[Any]:
        batches.append(sum(one.nbytes for one in wanted))
        return read(wanted)

    monkeypatch.setattr(reader, "read", count)
    leaves = [leaf for _, leaf in iter_leaves(reader.tree) if isinstance(leaf, LeafHandle)]
    casts = {leaf: casting.Cast(np.dtype(np.float16)) for leaf in leaves if leaf.name != "kept"}
    values = casting.read(reader, leaves, casts)
    assert [values[leaf].dtype for leaf in leaves] == [np.float16] * (len(leaves) - 1) + [np.float32]
    assert batches[0] == 36_000 and max(batches[1:-1]) <= 1000 and batches[-1] == 20_000


def test_one_leaf_in_two_dtypes(flag: bool, tmp_path: Path) -> None:
    """A stored leaf that two of the target's leaves are made of has the dtype of each of them."""
    with use_flag(flag), config.override(dtype="target"):
        path = checkpoints.save_checkpoint(tmp_path, {"a": np.arange(6, dtype=np.float32) / 2}, 1)
        target = {"a": np.zeros(6, np.float16), "b": np.zeros(6, np.int32)}
        copies = {"b": transforms.Transform(original_key="a")}
        restored = checkpoints.restore_checkpoint(path, target, orbax_transforms=copies)
    assert {name: value.dtype for name, value in restored.items()} == {"a": np.float16, "b": np.int32}
    assert restored["a"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5] and restored["b"].tolist() == [0, 0, 1, 1, 2, 2]


def test_x64_is_switched_within_a_process(flag: bool, tmp_path: Path) -> None:
    """Each restore goes by what jax holds when it is called: 64 bits come to a device, or whole as numpy."""
    values = np.array([1 + 2**-40, 2.0])
    checkpoints.save_checkpoint(tmp_path, {"w": values}, 1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    before = jax.config.jax_enable_x64
    try:
        for on in (False, True, False, True):
            jax.config.update("jax_enable_x64", on)
            target = {"w": jax.ShapeDtypeStruct((2,), np.float64, sharding=sharding)}
            restored = checkpoints.restore_checkpoint(tmp_path, target)["w"]
            assert isinstance(restored, jax.Array if on else np.ndarray)
            assert restored.dtype == np.float64
            assert np.asarray(restored).tobytes() == values.tobytes()
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("values, lost", [([1.5, -2.0, np.inf, np.nan, -np.inf], False), ([1.0, np.inf, 1e6], True)])
def test_infinities_and_nan_are_no_loss(values: list[float], lost: bool) -> None:
    """They stay what they are; what becomes infinite is lost: float16 ends at 65504 (IEEE 754)."""
    assert casting.is_lossy(np.array(values, np.float32), np.dtype(np.float16)) == lost


def test_a_longer_fraction_is_no_longer_range() -> None:
    """float16 holds each bfloat16 but those from 65520 on (IEEE 754), of which float32 holds all."""
    for value, lost in ((65024.0, False), (1e38, True)):
        assert casting.is_lossy(np.array([value], jnp.bfloat16), np.dtype(np.float16)) is lost
        assert not casting.is_lossy(np.array([value], jnp.bfloat16), np.dtype(np.float32))


@pytest.mark.parametrize("value", [2**63 + 5, 2**64 - 1, -(2**63), 7])
@pytest.mark.parametrize("kind", [int, np.uint64])
def test_integers_of_python_have_no_limit(kind: Any, value: int, flag: bool, tmp_path: Path) -> None:
    """A target's int takes each stored one, though int64, numpy's dtype of an int, ends at 2**63."""
    if kind is np.uint64 and value < 0:
        value += 2**64
    with use_flag(flag), config.override(dtype="target"):
        checkpoints.save_checkpoint(tmp_path, {"seed": kind(value)}, 1)
        restored = checkpoints.restore_checkpoint(tmp_path, {"seed": 0})["seed"]
    assert type(restored) is int and restored == value


def test_leaves_that_are_kept_and_abstract_are_told(flag: bool, tmp_path: Path, caplog: Any) -> None:
    """They have no values: the state came back with a ShapeDtypeStruct in it, without a word."""
    path = checkpoints.save_checkpoint(tmp_path, {"body": np.ones(2, np.float32)}, 1)
    target = jax.eval_shape(lambda: {"body": jnp.zeros(2), "head": {"w": jnp.zeros(3)}})
    restored = restore(path, target, transforms=[rules.from_target("head")])
    assert isinstance(restored["head"]["w"], jax.ShapeDtypeStruct)
    (message,) = caplog.messages
    assert "head/w" in message and "no values" in message and "body" not in message


def test_batches_hold_as_much_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than fits at once, unless one array is larger; and each begins with all of the room."""
    monkeypatch.setattr(casting, "_AT_ONCE", 100)
    memory = Memory({f"a{n}": np.zeros(size, np.uint8) for n, size in enumerate([40, 40, 40, 200, 10, 10])})
    handles = [leaf for _, leaf in iter_leaves(memory.tree)]
    batches = [[one.nbytes for one in batch] for batch in casting._batches(handles)]
    assert batches == [[40, 40], [40], [200], [10, 10]]
