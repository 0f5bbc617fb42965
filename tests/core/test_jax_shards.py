"""Shards of jax arrays."""

from __future__ import annotations

from pathlib import Path

from tests.support.interpreters import devices, run_python


def test_trees_of_numpy_arrays_do_not_start_jax() -> None:
    """A program that only moves checkpoints around must not take the memory of a GPU."""
    code = """
import sys, tempfile
import numpy as np
from flax_ckpt_compat import checkpoints, config
import flax
from jax._src import xla_bridge
for orbax in (False, True):
    flax.config.update("flax_use_orbax_checkpointing", orbax)
    with tempfile.TemporaryDirectory() as directory:
        checkpoints.save_checkpoint(directory, {"a": np.ones(3)}, 0)
        restored = checkpoints.restore_checkpoint(directory, {"a": np.zeros(3)})
        assert restored["a"].tolist() == [1, 1, 1]
        assert not xla_bridge.backends_are_initialized(), f"a backend was started, orbax={orbax}"
"""
    run_python(code, PYTHONWARNINGS="ignore")


MIXED_UP = """
import sys, threading
import flax, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from flax_ckpt_compat import checkpoints

sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
values = np.arange(16.0, dtype=np.float32)


def listed_by_two_threads():
    array, both = jax.device_put(values, sharding), threading.Barrier(2)
    threads = [threading.Thread(target=lambda: (both.wait(), array.addressable_data(0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return array


def is_mixed_up(array):
    return any(array.addressable_data(at).devices() != {device} for at, device in enumerate(jax.devices()))


sys.setswitchinterval(1e-6)
made = (listed_by_two_threads() for _ in range(300))
mixed_up = next(filter(is_mixed_up, made), None)  # None if this jax has locks
sys.setswitchinterval(0.005)
for orbax in (False, True):
    flax.config.update("flax_use_orbax_checkpointing", orbax)
    for step, array in enumerate([mixed_up, jax.device_put(values, sharding), mixed_up]):
        for manager in (None, checkpoints.AsyncManager()):
            if array is not None:
                folder = f"{sys.argv[1]}/{orbax}{step}{manager is None}"
                checkpoints.save_checkpoint(folder, {"a": array}, 1, async_manager=manager)
                if manager is not None:
                    manager.wait_previous_save()
                np.testing.assert_array_equal(checkpoints.restore_checkpoint(folder, None)["a"], values)
"""


def test_an_array_whose_shards_two_threads_listed_at_once(tmp_path: Path) -> None:
    """jax then has some shards twice, at other places; each is saved where it belongs, and so are the next arrays."""
    run_python(MIXED_UP, tmp_path, **devices(8))
