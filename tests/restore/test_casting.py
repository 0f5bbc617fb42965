"""Casts while reading: what numpy makes of the values, and only a little of them in two dtypes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, config, restore, rules, save, transforms
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.progress import OFF
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


def test_which_casts_exist() -> None:
    """Between numbers of any kind, and within a kind of what are not numbers; to a typed key there is none."""
    assert casting.exists(np.dtype(np.int8), np.dtype(jnp.bfloat16))
    assert casting.exists(np.dtype("U3"), np.dtype("U5"))
    assert not casting.exists(np.dtype("U3"), np.dtype(np.int8))
    assert not casting.exists(np.dtype(np.uint32), jax.random.key(0).dtype)


def test_little_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays to cast are read in batches of little memory, or alone; the others all together."""
    monkeypatch.setattr(casting, "_AT_ONCE", 1000)
    batches: list[int] = []
    reader = Memory({**VALUES, "huge": np.ones(5000, np.float32), "kept": np.ones(9000, np.float32)})
    read = reader.read

    def count(wanted: Sequence[Any], **_: Any) -> list[Any]:
        batches.append(sum(one.nbytes for one in wanted))
        return read(wanted)

    monkeypatch.setattr(type(reader), "read", lambda _, wanted, **__: count(wanted))
    leaves = [leaf for _, leaf in iter_leaves(reader.tree) if isinstance(leaf, LeafHandle)]
    casts = {leaf: casting.Cast(np.dtype(np.float16)) for leaf in leaves if leaf.name != "kept"}
    values = casting.read(leaves, casts, frozenset(), OFF)
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


# Stored dtype, wanted dtype, values that survive, and others of which each is lost. float64 has all integers up to
# 2**53, and float16 ends at 65504, to which what is up to half a step above it rounds (IEEE 754).
LOSSES: list[tuple[Any, Any, list[Any], list[Any]]] = [
    (np.complex128, np.float64, [1 + 0j], [1 + 2j]),
    (np.complex128, np.float32, [1 + 0j], [1e300 + 0j]),
    (np.complex128, np.complex64, [1 + 2j], [1e300 + 1j, 1 + 1e300j]),
    (np.int64, np.float64, [2**53, 2**53 + 2], [2**53 + 1, -(2**53) - 1, 2**63 - 1]),
    (np.int64, np.complex128, [2**53, 2**53 + 2], [2**53 + 1, -(2**53) - 1, 2**63 - 1]),
    (np.int64, np.int8, [-128, 127], [-129, 128]),
    (np.float32, np.float16, [1.5, 65510.0, np.inf, -np.inf, np.nan], [65536.0, -65536.0]),
    (np.float16, np.int32, [3.0, -4.0], [0.5, np.inf, -np.inf, np.nan]),
    (jnp.bfloat16, np.float16, [65024.0], [1e38]),
    (jnp.bfloat16, np.float32, [65024.0, 1e38], []),
    (np.float32, bool, [0.0, 1.0], [2.0, np.nan]),
]


@pytest.mark.parametrize(("stored", "wanted", "kept", "lost"), LOSSES)
def test_what_a_cast_loses(
    stored: Any, wanted: Any, kept: list[Any], lost: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A restore warns of each leaf that has other values afterwards, and of no other."""
    tree = {f"kept_{at}": np.array([value], stored) for at, value in enumerate(kept)}
    lossy = {f"lost_{at}": np.array([value], stored) for at, value in enumerate(lost)}
    for name, value in (tree | lossy).items():
        caplog.clear()
        path = save(tmp_path / name, {name: value}, format="msgpack")
        restore(path, {name: np.zeros(1, wanted)}, dtype="target")
        assert ["does not hold all values" in text for text in caplog.messages] == [True] * (name in lossy)
