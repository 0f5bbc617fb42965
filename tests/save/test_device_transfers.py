"""Copies from accelerators; devices of the CPU play GPUs, as jax gives them page-locked memory, too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._save import snapshot
from tests.support.saves import around, save_by, use_flag

_HAS_PAGE_LOCKED = any(memory.kind == "pinned_host" for memory in jax.devices()[0].addressable_memories())
pytestmark = pytest.mark.skipif(not _HAS_PAGE_LOCKED, reason="this jax has one kind of memory on CPUs")
_NAMES = ("float32", "bfloat16", "bool", "int8", "uint32", "complex64", "float8_e4m3fn", "int4")


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make devices of the CPU count as GPUs, and transfers of any size as large."""
    monkeypatch.setattr(snapshot, "can_lock_pages", lambda sharding: sharding.memory_kind == "device")
    monkeypatch.setattr(snapshot, "is_on_host", lambda sharding: sharding.memory_kind != "device")
    monkeypatch.setattr(snapshot, "_MIN_LOCKED_BYTES", 0)


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the arrays of each transfer into page-locked memory."""
    counts: list[int] = []
    place = jax.device_put

    def counted(arrays: Any, *where: Any, **options: Any) -> Any:
        if isinstance(arrays, list):
            counts.append(len(arrays))
        return place(arrays, *where, **options)

    monkeypatch.setattr(jax, "device_put", counted)
    yield counts
    monkeypatch.setattr(jax, "device_put", place)


def _arrays() -> list[jax.Array]:
    arrays = [jnp.asarray(np.arange(24).reshape(4, 6)).astype(name) for name in _NAMES]
    return [*arrays, jnp.float32(3), jnp.zeros((0, 3)), jax.jit(jnp.transpose)(arrays[0])]


def test_values_are_those_of_numpy(placed: list[int]) -> None:
    """In C order; what numpy holds in more memory than a device does is not viewed."""
    arrays = _arrays()
    found = snapshot.to_host(arrays)
    assert placed == [len(arrays) - 1]  # all but int4
    for array, value in zip(arrays, found, strict=True):
        assert value.dtype == array.dtype and value.shape == array.shape and value.flags.c_contiguous
        assert value.tobytes() == np.array(array, order="C").tobytes()


def test_arrays_in_another_layout() -> None:
    """A compiler may choose columns first for what it keeps on a device; the values are in C order all the same."""
    layouts = pytest.importorskip("jax.experimental.layout")
    if not hasattr(layouts, "Format"):
        pytest.skip("this jax names layouts otherwise")
    array = jnp.arange(12.0).reshape(3, 4)
    array = jax.device_put(array, layouts.Format(layouts.Layout((1, 0)), array.sharding))
    assert not np.asarray(array).flags.c_contiguous
    (found,) = snapshot.to_host([array])
    assert found.flags.c_contiguous and found.tolist() == np.arange(12.0).reshape(3, 4).tolist()


def test_no_memory_to_lock(monkeypatch: pytest.MonkeyPatch, placed: list[int]) -> None:
    """numpy copies all, and nothing more is tried: jax waits for ten seconds before it says that there is no more."""

    def refuse(arrays: Any, shardings: Any) -> Any:
        placed.append(len(arrays))
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")

    monkeypatch.setattr(jax, "device_put", refuse)
    monkeypatch.setattr(snapshot, "_most_locked", 2**30)
    arrays = [jnp.full(20, number) for number in range(9)]
    for _ in range(2):
        found = snapshot.to_host(arrays)
        assert [value.tolist() for value in found] == [[number] * 20 for number in range(9)]
    assert placed == [9]


@pytest.mark.parametrize(("budget", "count"), [(0, []), (79, []), (160, [2]), (719, [8]), (720, [9])])
def test_budget(budget: int, count: list[int], monkeypatch: pytest.MonkeyPatch, placed: list[int]) -> None:
    """No more is locked than jax may lock; of nine arrays of 80 bytes, the rest is copied by numpy."""
    monkeypatch.setattr(snapshot, "_most_locked", budget)
    found = snapshot.to_host([jnp.full(20, number) for number in range(9)])
    assert placed == count
    assert [value.tolist() for value in found] == [[number] * 20 for number in range(9)]


def test_arrays_in_host_memory_are_copied(tmp_path: Path, placed: list[int]) -> None:
    """numpy sees page-locked memory of the user's own as it is, which a donation would change during the save."""
    sharding = jnp.zeros(3).sharding.with_memory_kind("pinned_host")
    tree = {"a": jax.device_put([jnp.arange(3000.0)], [sharding])[0]}
    placed.clear()
    save_by(checkpoints.AsyncManager(), tmp_path, tree, 1)
    assert placed == []
    assert checkpoints.restore_checkpoint(tmp_path, None)["a"].tolist() == list(range(3000))


def test_shards(tmp_path: Path, flag: bool) -> None:
    """Each is copied from its own device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"), memory_kind="device")
    array = jax.device_put(np.arange(32.0).reshape(16, 2), sharding)
    with use_flag(flag):
        checkpoints.save_checkpoint(tmp_path, {"a": array}, 1)
        found = checkpoints.restore_checkpoint(tmp_path, None)
    np.testing.assert_array_equal(found["a"], np.arange(32.0).reshape(16, 2))


def test_other_accelerators(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: list[int]) -> None:
    """Their transfers are started before any is waited for, also where implicit transfers are forbidden."""
    monkeypatch.setattr(snapshot, "can_lock_pages", lambda sharding: False)
    kind, manager, calls = type(jnp.zeros(1)), checkpoints.AsyncManager(), list[Any]()
    around(monkeypatch, kind, "copy_to_host_async", lambda array: calls.append(array.shape))
    around(
        monkeypatch,
        snapshot,
        "to_host",
        lambda _: calls.append(jax.config.jax_transfer_guard_device_to_host),  # type: ignore[attr-defined]
        lambda _: calls.append("made"),
    )
    with use_flag(flag), jax.transfer_guard_device_to_host("disallow"):
        target = {"a": jnp.arange(3), "b": jnp.ones((2, 2), jnp.bfloat16), "k": jax.random.key(7)}
        checkpoints.save_checkpoint(tmp_path, target, 1, async_manager=manager)
        assert calls == ["allow", (3,), (2, 2), (2,), "made"]
    manager.wait_previous_save()
    assert placed == []
    found = checkpoints.restore_checkpoint(tmp_path, None)
    np.testing.assert_array_equal(found["a"], np.arange(3))
    np.testing.assert_array_equal(found["b"], np.ones((2, 2)))
    np.testing.assert_array_equal(jax.random.key_data(found["k"]), [0, 7])
