"""Saves arrays sharded over eight devices, with real Orbax or with ours: ``FOLDER WRITER...``."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def sharded_tree() -> dict[str, Any]:
    """Arrays with every kind of split of a mesh of 4 by 2, replicated ones, and a sharded key array."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    specs = {
        "both": PartitionSpec("x", "y"),
        "rows": PartitionSpec("x", None),
        "columns": PartitionSpec(None, "y"),
        "merged": PartitionSpec(("x", "y")),
        "replicated": PartitionSpec(),
        "swapped": PartitionSpec(("y", "x")),
    }
    tree: dict[str, Any] = {
        name: jax.device_put(values + number, NamedSharding(mesh, spec))
        for number, (name, spec) in enumerate(specs.items())
    }
    tree["bf16"] = jax.device_put(jnp.ones((8, 4), jnp.bfloat16), NamedSharding(mesh, PartitionSpec("x", "y")))
    tree["large"] = jax.device_put(jnp.arange(80_000.0).reshape(200, 400), NamedSharding(mesh, PartitionSpec("x")))
    tree["keys"] = jax.device_put(jax.random.split(jax.random.key(7), 8), NamedSharding(mesh, PartitionSpec("x")))
    return tree


def main(folder: str, *writers: str) -> None:
    """Writes the tree with each of the writers, into a directory of its name."""
    tree = sharded_tree()
    for writer in writers:
        write(tree, writer, f"{folder}/{writer}")


def write(tree: dict[str, Any], writer: str, target: str) -> None:
    """Writes the tree, and with ours checks that real Orbax restores it with the same shardings."""
    import orbax.checkpoint as ocp

    if writer == "ours":
        from tests.support.orbax_trees import save

        restored = ocp.PyTreeCheckpointer().restore(save(target, tree))
        for name, array in tree.items():
            assert restored[name].sharding.is_equivalent_to(array.sharding, array.ndim), name
            assert bool((restored[name] == array).all()), name
        return
    options = {"zarr3": {"use_zarr3": True}, "files": {"use_ocdbt": False}, "plain": {"use_compression": False}}
    handler = ocp.PyTreeCheckpointHandler(**options.get(writer, {}))
    ocp.Checkpointer(handler).save(target, args=ocp.args.PyTreeSave(tree))


if __name__ == "__main__":
    main(*sys.argv[1:])
