"""What the processes of a team save with real Flax: large arrays that are split over all their devices."""

import warnings

import flax
import jax
import numpy as np
from flax.training import checkpoints
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import Mesh, NamedSharding, PartitionSpec

VALUES = np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)
ODD = VALUES.astype(jax.numpy.bfloat16)


def save(folder: str, use_orbax: bool) -> None:
    """Saves with real Flax: rows over x, columns over y; in bfloat16 too, which has other words on the disk."""
    flax.config.update("flax_use_orbax_checkpointing", use_orbax)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    tree = {}
    for name, values, spec in (
        ("w", VALUES, PartitionSpec("x", "y")),
        ("odd", np.tile(ODD, (1, 2)), PartitionSpec("x")),
    ):
        sharding = NamedSharding(mesh, spec)
        tree[name] = jax.make_array_from_callback(values.shape, sharding, lambda index, values=values: values[index])
    manager = None if use_orbax else GlobalAsyncCheckpointManager()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints.save_checkpoint_multiprocess(folder, tree, 1, gda_manager=manager)
        if manager is not None:
            manager.wait_until_finished()
