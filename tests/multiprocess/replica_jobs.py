"""What the processes of a team do in the tests of saves of arrays that all of them hold."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat._trees import prng_keys
from tests.multiprocess import jobs

ROWS = 512
LAYERS = 8


def values() -> dict[str, Any]:
    """Eight large arrays of 1 MiB, one of another dtype, and small ones."""
    rng = np.random.default_rng(3)
    found = {f"layer{number}": rng.random((ROWS, 512), np.float32) for number in range(LAYERS)}
    return found | {"bf16": found["layer0"].repeat(2, 0).astype(jnp.bfloat16), "bias": np.arange(3, dtype=np.float32)}


def replicated(array: Any) -> Any:
    """An array that each process holds, as it is given there."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    shards = [jax.device_put(array, device) for device in jax.local_devices()]
    return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(mesh, P()), shards)


def state(kind: str = "") -> dict[str, Any]:
    """The tree that this process saves; of kind ``lacking``, process 1 lacks an array."""
    tree: dict[str, Any] = {name: replicated(array) for name, array in values().items()}
    if kind == "lacking" and jax.process_index() == 1:
        tree["layer1"] = None
    return tree | {"step": 3, "host": np.arange(ROWS * 512.0)}


def save_on_some(folder: str) -> int:
    """Saves arrays that the first two of three processes hold; how many bytes this process wrote."""
    jobs.use(True)
    devices = [device for device in jax.devices() if device.process_index < 2]
    sharding = NamedSharding(Mesh(np.array(devices), ("some",)), P())

    def put(array: Any) -> Any:
        if not sharding.addressable_devices:
            return prng_keys.without_shards(array.shape, array.dtype, sharding)
        return jobs.put(array, sharding)

    tree, before = {name: put(array) for name, array in values().items()}, written()
    checkpoints.save_checkpoint_multiprocess(folder, tree, 1)
    jobs.barrier("saved")
    found = checkpoints.restore_checkpoint(folder, None)
    for name, array in values().items():
        assert np.asarray(found[name]).tobytes() == array.tobytes(), name
    return written() - before


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        got = ocp.PyTreeCheckpointer().restore(f"{folder}/checkpoint_1", item=target, restore_args=arguments)
    for name, array in values().items():
        assert got[name].sharding.is_equivalent_to(target[name].sharding, array.ndim)
        jobs.check_shards(name, got[name], array)
    assert got["step"] == 3
