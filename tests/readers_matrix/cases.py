"""The checkpoints that old releases read: written by this library, with the values in a form that needs no library."""

import base64
import json
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flax_ckpt_compat as fcc
from flax_ckpt_compat import checkpoints
from tests.support.team import Team

MESH = (4, 2)
SPECS = {"xy": ("x", "y"), "both": (("x", "y"),), "part": (None, "x"), "replicated": ()}
PROCESSES = 2


def trees() -> dict[str, Any]:
    """Case → tree: leaves on one device, over the devices of a mesh, and with a text."""
    rng = np.random.default_rng(0)
    tree = {
        "params": {
            "w": jnp.asarray(rng.standard_normal((64, 32)), jnp.float32),
            "half": jnp.arange(7, dtype=jnp.bfloat16),
            "table": rng.integers(0, 99, (150, 100)),
            "flags": np.array([True, False]),
        },
        "opt": [{"mu": jnp.ones(3), "count": jnp.int32(7)}, (np.zeros(2), np.uint8([1, 2]))],
        "none": None,
        "empty": {},
        "step": 3,
        "lr": 0.5,
        "done": True,
    }
    return {"whole": tree, "sharded": sharded(), "text": {"name": "héllo", "w": np.ones(3)}}


def sharded() -> dict[str, Any]:
    """Arrays over all devices of all processes."""
    mesh, values = Mesh(np.array(jax.devices()).reshape(MESH), ("x", "y")), np.arange(128, dtype=np.float32)
    values = values.reshape(16, 8)
    params = {
        name: jax.make_array_from_callback(
            values.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda index: values[index]
        )
        for name, spec in SPECS.items()
    }
    return {"params": params, "step": 3}


def write(root: Path) -> None:
    """Write every case in both formats, and as steps of a `CheckpointManager`.

    What several processes save is in Orbax's format only: Flax restores their msgpack files in several processes only.
    """
    for case, tree in trees().items():
        (root / case).mkdir(parents=True)
        (root / case / "expected.json").write_text(json.dumps(described(tree)))
        flax.config.update("flax_use_orbax_checkpointing", False)
        checkpoints.save_checkpoint(root / case / "msgpack", tree, 1)
        save(root / case, tree)
    folder = root / "processes"
    folder.mkdir()
    (folder / "expected.json").write_text((root / "sharded" / "expected.json").read_text())
    team = Team(PROCESSES, jax.device_count() // PROCESSES)
    try:
        team.call(save_sharded, str(folder))
    finally:
        team.close()
    for folder in root.iterdir():
        fcc.convert(folder / "orbax-default" / "checkpoint_1", folder / "manager-default", to="manager")


def save_sharded(folder: str) -> None:
    """Save what is sharded over all processes; each of them calls this."""
    save(Path(folder), sharded())


def save(folder: Path, tree: Any) -> None:
    """Save a tree in Orbax's format."""
    flax.config.update("flax_use_orbax_checkpointing", True)
    checkpoints.save_checkpoint_multiprocess(folder / "orbax-default", tree, 1)


def described(tree: Any) -> Any:
    """The tree as JSON, of a leaf ``{"leaf": …}``: its value, or that of an array with its partition spec, if any."""
    if isinstance(tree, list | tuple):
        return [described(child) for child in tree]
    if isinstance(tree, dict) and tree:
        return {name: described(child) for name, child in tree.items()}
    if not hasattr(tree, "dtype"):
        return {"leaf": {"value": tree}}
    array = np.asarray(tree)
    found = {"dtype": array.dtype.name, "shape": array.shape, "data": base64.b64encode(array.tobytes()).decode()}
    sharding = getattr(tree, "sharding", None)
    spec = list(sharding.spec) if isinstance(sharding, NamedSharding) else None
    return {"leaf": {**found, "spec": spec, "jax": sharding is not None}}
