"""Saves in Orbax's format of arrays that all processes hold: each array is written by one of them."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat._core.tree import KeyData
from flax_ckpt_compat._trees import prng_keys
from tests.multiprocess import jobs
from tests.support.peers import needs_arrays_without_shards
from tests.support.team import team_of

ROWS = 512
LAYERS = 8


def values() -> dict[str, Any]:
    """Eight large arrays of 1 MiB, one of another dtype, and small ones."""
    rng = np.random.default_rng(3)
    found = {f"layer{number}": rng.random((ROWS, 512), np.float32) for number in range(LAYERS)}
    return found | {"bf16": found["layer0"].repeat(2, 0).astype(jnp.bfloat16), "bias": np.arange(3, dtype=np.float32)}


def state(kind: str = "") -> dict[str, Any]:
    """The tree that this process saves; of kind ``lacking`` process 1 lacks an array, of ``some`` process 2 all."""
    devices = [device for device in jax.devices() if kind != "some" or device.process_index < 2]
    sharding = NamedSharding(Mesh(np.array(devices), ("all",)), P())
    tree: dict[str, Any] = {name: jobs.put(array, sharding) for name, array in values().items()}
    if kind == "lacking" and jax.process_index() == 1:
        tree["layer1"] = None
    return tree | {"step": 3, "host": np.arange(ROWS * 512.0)}


def save(folder: str, kind: str = "", in_background: bool = False, settings: Any = None) -> int:
    """Saves it; how many bytes this process wrote, as the kernel counts them."""
    jobs.use(True)
    tree, manager = state(kind), checkpoints.AsyncManager() if in_background else None
    before = written()
    with config.override(**(settings or {})):
        checkpoints.save_checkpoint_multiprocess(folder, tree, 1, async_manager=manager, overwrite=True)
        if manager is not None:
            manager.wait_previous_save()
    jobs.barrier("saved")
    return written() - before


def written() -> int:
    """How many bytes this process has written so far."""
    with open("/proc/self/io") as file:
        return int(file.read().split("wchar: ")[1].split()[0])


def restore(folder: str) -> None:
    """Restores it without a target, and onto all devices; compares every bit."""
    wanted = values() | {"host": np.arange(ROWS * 512.0), "step": 3}
    for target in (None, state()):
        got = checkpoints.restore_checkpoint(folder, target)
        for name, array in wanted.items():
            found = np.asarray(got[name].addressable_data(0) if isinstance(got[name], jax.Array) else got[name])
            assert found.tobytes() == np.asarray(array).tobytes(), name


def restore_with_orbax(folder: str) -> None:
    """Restores it with real Orbax, onto all devices."""
    target = state()
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    got = ocp.PyTreeCheckpointer().restore(f"{folder}/checkpoint_1", item=target, restore_args=arguments)
    for name, array in values().items():
        assert got[name].sharding.is_equivalent_to(target[name].sharding, array.ndim)
        jobs.check_shards(name, got[name], array)
    assert got["step"] == 3


MIB = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the bytes in /proc/self/io")


@pytest.mark.slow
@linux
@pytest.mark.parametrize(
    ("count", "in_background", "settings"),
    [(2, False, {}), (2, True, {}), (4, False, {}), (2, False, {"compression": "crc32c"})],
)
def test_the_work_is_shared(tmp_path: Path, count: int, in_background: bool, settings: dict[str, Any]) -> None:
    """Of 9 MiB that all hold each array is written by one, and process 0 writes 2 MiB more; real Orbax reads it."""
    team = team_of(count)
    written = team.call(save, str(tmp_path), "", in_background, settings)
    assert 11 * MIB < sum(written) < 12.2 * MIB
    assert max(written) < 11 * MIB
    team.call(restore, str(tmp_path))
    team.call(restore_with_orbax, str(tmp_path))
    team_of(1).call(restore_with_orbax, str(tmp_path))


@linux
@needs_arrays_without_shards
def test_arrays_that_one_process_does_not_hold(tmp_path: Path) -> None:
    """Those that hold them write them, each some, and the third one has none."""
    first, second, third = team_of(3).call(save, str(tmp_path), "some")
    assert first + second < 12.4 * MIB and first > 3 * MIB and second > MIB, (first, second)
    assert third < MIB // 4
    team_of(1).call(restore, str(tmp_path))


@linux
def test_a_process_that_lacks_an_array(tmp_path: Path) -> None:
    """Process 0 writes all where the others hold something else; the files say the same, whoever writes."""
    team = team_of(2)
    for kind in ("shared", "lacking"):
        first, other = team.call(save, str(tmp_path / kind), kind)
        assert (first > 11 * MIB, other < MIB // 4) == (kind == "lacking",) * 2
        team.call(restore, str(tmp_path / kind))
    for name in ("_METADATA", "_sharding", "array_metadatas/process_0"):
        shared, alone = (tmp_path / folder / "checkpoint_1" / name for folder in ("shared", "lacking"))
        assert shared.read_bytes() == alone.read_bytes()
    assert jobs.names(str(tmp_path / "shared/checkpoint_1")) == jobs.names(str(tmp_path / "lacking/checkpoint_1"))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_stand_ins_of_other_processes_arrays(shape: tuple[int, ...]) -> None:
    """They have shape and dtype, and those of typed keys the implementation, as jax has them, and no memory."""
    array, keys = jnp.ones(shape, jnp.bfloat16), jax.random.split(jax.random.key(3, impl="rbg"), shape)
    found = prng_keys.placeholder(array)
    assert (found.shape, found.dtype) == (array.shape, array.dtype) and not any(found.strides)
    key = prng_keys.placeholder(keys)
    data = jax.random.key_data(keys)
    assert isinstance(key, KeyData) and key.impl == "rbg"
    assert (key.data.shape, key.data.dtype) == (data.shape, data.dtype) and not any(key.data.strides)
