"""The checkpoints that old releases read: written by this library, with the values in a form that needs no library."""

from __future__ import annotations

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
from flax_ckpt_compat import checkpoints, config

MESH = (4, 2)
SETTINGS = {"0.6": "default", "0.3": "old"}  # value of oldest_orbax → name of the directory


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
    mesh = Mesh(np.array(jax.devices()).reshape(MESH), ("x", "y"))
    specs = {"xy": ("x", "y"), "both": (("x", "y"),), "part": (None, "x"), "replicated": ()}
    sharded = {
        name: jax.device_put(np.arange(128, dtype=np.float32).reshape(16, 8), NamedSharding(mesh, PartitionSpec(*spec)))
        for name, spec in specs.items()
    }
    return {"whole": tree, "sharded": {"params": sharded, "step": 3}, "text": {"name": "héllo", "w": np.ones(3)}}


def write(root: Path) -> None:
    """Write every case in both formats, with the setting and without, and as steps of a `CheckpointManager`."""
    for case, tree in trees().items():
        folder = root / case
        (folder).mkdir(parents=True)
        (folder / "expected.json").write_text(json.dumps(described(tree)))
        flax.config.update("flax_use_orbax_checkpointing", False)
        checkpoints.save_checkpoint(folder / "msgpack", tree, 1)
        flax.config.update("flax_use_orbax_checkpointing", True)
        for oldest, name in SETTINGS.items():
            with config.override(oldest_orbax=oldest):
                checkpoints.save_checkpoint(folder / f"orbax-{name}", tree, 1)
                fcc.convert(folder / f"orbax-{name}" / "checkpoint_1", folder / f"manager-{name}", to="manager")


def described(tree: Any, path: str = "") -> dict[str, Any]:
    """State-dict path → value, as JSON; an array with its partition spec, if it has one."""
    if isinstance(tree, list | tuple):
        tree = {str(index): child for index, child in enumerate(tree)}
    if isinstance(tree, dict) and tree:
        return {key: one for name, child in tree.items() for key, one in described(child, f"{path}/{name}").items()}
    if not hasattr(tree, "dtype"):
        return {path[1:]: {"value": tree}}
    array = np.asarray(tree)
    found = {"dtype": array.dtype.name, "shape": array.shape, "data": base64.b64encode(array.tobytes()).decode()}
    sharding = getattr(tree, "sharding", None)
    spec = list(sharding.spec) if isinstance(sharding, NamedSharding) else None
    return {path[1:]: {**found, "spec": spec, "jax": sharding is not None}}
