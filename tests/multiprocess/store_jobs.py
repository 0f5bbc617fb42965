"""What the processes of a team do in the tests of saves to stores."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_ckpt_compat import checkpoints, config
from tests.multiprocess import real_jobs
from tests.multiprocess.jobs import barrier, check_shards, large, mesh, put, small, use


def lead_to(environments: list[Mapping[str, str]]) -> None:
    """Sets the variables that lead this process to the server."""
    os.environ.update(environments[jax.process_index()])


def save_in_background(folder: str, orbax: bool) -> list[float]:
    """Saves three steps and the last once more, each from memory that is overwritten at once; what is there then."""
    use(orbax)
    manager = checkpoints.AsyncManager()
    spoil = jax.jit(lambda w: w * 0 - 1, donate_argnums=0)
    for step in (1, 2, 3, 3):
        tree = small(step)
        checkpoints.save_checkpoint_multiprocess(folder, tree, step, keep=2, overwrite=step == 3, async_manager=manager)
        spoil(tree["w"]).block_until_ready()
        tree["v"][:] = -1
    manager.wait_previous_save()
    barrier("saved")
    steps = checkpoints.available_steps(folder)
    for step in steps:
        got = checkpoints.restore_checkpoint(folder, small(-1), step)
        check_shards("w", got["w"], np.full((8, 4), step, np.float32))
        np.testing.assert_array_equal(got["v"], np.full(3, step))
    return list(map(float, steps))


def save_what_flax_can_hold(folder: str, orbax: bool) -> str:
    """Saves the tree of `real_jobs` with ours as step 1."""
    use(orbax)
    return checkpoints.save_checkpoint_multiprocess(folder, real_jobs.tree("plain"), 1)


def overwrite(folder: str, orbax: bool, step: int, value: int, wait: float) -> str:
    """Saves `small` of another value as a step that may be there."""
    use(orbax)
    with config.override(coordination_timeout=wait):
        return checkpoints.save_checkpoint_multiprocess(folder, small(value), step, overwrite=True)


def overwrite_large(folder: str, orbax: bool) -> str:
    """Saves 16 MB over all processes as a step that is there."""
    use(orbax)
    tree = {"large": put(large() + 1, NamedSharding(mesh("plain"), P(("x", "y"))))}
    return checkpoints.save_checkpoint_multiprocess(folder, tree, 1, overwrite=True)


def left_over() -> list[str]:
    """Local temporaries of saves of this process."""
    folder = os.path.join(tempfile.gettempdir(), f"flax_ckpt_compat-{os.getuid()}")
    return [name for name in os.listdir(folder) if f"-{os.getpid()}-" in name]
