"""What the processes of a team do in the tests of saves to stores."""

import os
import tempfile
from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_ckpt_compat import checkpoints, config
from tests.multiprocess.jobs import barrier, large, mesh, put, restore_small, save_and_spoil, small, use


def lead_to(environments: list[Mapping[str, str]]) -> None:
    """Sets the variables that lead this process to the server."""
    os.environ.update(environments[jax.process_index()])


def save_in_background(folder: str, orbax: bool) -> list[float]:
    """Saves three steps and the last once more, each from memory that is overwritten at once; what is there then."""
    use(orbax)
    manager = checkpoints.AsyncManager()
    for step in (1, 2, 3, 3):
        save_and_spoil(folder, step, manager, keep=2, overwrite=step == 3)
    manager.wait_previous_save()
    barrier("saved")
    return [restore_small(folder, step) for step in checkpoints.available_steps(folder)]


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
