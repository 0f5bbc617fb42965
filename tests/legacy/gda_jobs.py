"""What the processes of a team do with msgpack checkpoints: ours, and real Flax's with its manager."""

from __future__ import annotations

import warnings
from typing import Any

import flax
import jax
import ml_dtypes
import numpy as np
from flax.training import checkpoints as flax_checkpoints
from jax.experimental import multihost_utils
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_ckpt_compat import checkpoints as ours

# Of every array that both processes hold together: how it lies on a mesh of the axes x and y.
SPECS = {
    "both": PartitionSpec("x", "y"),
    "rows": PartitionSpec("x", None),
    "columns": PartitionSpec(None, "x"),
    "merged": PartitionSpec(("y", "x")),
    "cube": PartitionSpec("y", None, "x"),
    "second": PartitionSpec("y"),  # both processes have all of it
    "zeros": PartitionSpec(("x", "y")),
    "bf16": PartitionSpec("x", "y"),
    "fp8": PartitionSpec("x"),
    "int4": PartitionSpec("x"),
    "flags": PartitionSpec("x"),
    "waves": PartitionSpec("x"),
    "empty": PartitionSpec(None, "x"),
    "..": PartitionSpec("x"),
}


def values(n: int) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of `SPECS`, as numpy has them, in their ``n``-th version."""
    square = np.arange(64, dtype=np.float32).reshape(8, 8) + n
    return {
        "both": square,
        "rows": square * 2,
        "columns": square * 3,
        "merged": square.astype(np.int64).astype(np.int32),
        "cube": np.random.default_rng(n).random((4, 3, 4)).astype(np.float32),
        "second": square * 5,
        "zeros": -np.zeros((16, 2), np.float32),
        "bf16": (square / 3).astype(ml_dtypes.bfloat16),
        "fp8": square.astype(ml_dtypes.float8_e4m3fn),
        "int4": np.arange(-8, 8).astype(ml_dtypes.int4),
        "flags": np.arange(12) % 3 == n % 3,
        "waves": (np.arange(8) * 1j + n).astype(np.complex64),
        "empty": np.zeros((0, 4), np.float32),
        "..": np.arange(4, dtype=np.int32) - n,
    }


def _mesh(shape: tuple[int, int]) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))


def _placed(value: np.ndarray[Any, Any], spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def tree(n: int, mesh_shape: tuple[int, int] = (2, 2), *, plain: bool = True) -> dict[str, Any]:
    """The tree as this process holds it, with leaves that are not spread too.

    Args:
        n: the version.
        plain: without the names that real Flax cannot save.
    """
    mesh = _mesh(mesh_shape)
    spread: dict[str, Any] = {name: _placed(value, SPECS[name], mesh) for name, value in values(n).items()}
    dots = spread.pop("..")
    nested = {"layers": [spread, {"w/x": dots} if plain else {"..": dots, "a/b": dots, "a": {"b": dots}}]}
    return nested | {
        "n": n,
        "text": "t" * n,
        "host": np.full(3, n),
        "copied": _placed(np.full(4, n, np.float32), PartitionSpec(), mesh),
    }


def _quiet() -> None:
    warnings.simplefilter("ignore")
    flax.config.update("flax_use_orbax_checkpointing", False)


def save_ours(folder: str, step: int, n: int, copied: bool = False) -> None:
    """Saves with ours, in the background if the values are to be copied."""
    _quiet()
    manager = ours.AsyncManager() if copied else None
    ours.save_checkpoint_multiprocess(folder, tree(n, plain=False), step, keep=9, overwrite=True, async_manager=manager)
    if manager:
        manager.wait_previous_save()
    multihost_utils.sync_global_devices(f"saved {folder} {step} {n}")


def save_real(folder: str, step: int, n: int) -> None:
    """Saves with real Flax."""
    _quiet()
    manager = GlobalAsyncCheckpointManager()
    flax_checkpoints.save_checkpoint_multiprocess(folder, tree(n), step, keep=9, overwrite=True, gda_manager=manager)
    manager.wait_until_finished()
    multihost_utils.sync_global_devices(f"saved {folder} {step} {n}")


def restore_real(folder: str, step: int) -> tuple[int, list[str]]:
    """Restores ours with real Flax; the version, and the names of leaves of which any bit is not as saved."""
    _quiet()
    target = tree(0, plain=False)
    found = flax_checkpoints.restore_checkpoint(folder, target, step, gda_manager=GlobalAsyncCheckpointManager())
    return found["n"], _wrong(found, tree(found["n"], plain=False))


def restore_ours(folder: str, step: int, mesh_shape: tuple[int, int], plain: bool = False) -> tuple[int, list[str]]:
    """Restores with ours, onto this mesh; the version, and the names of leaves of which any bit is not as saved."""
    _quiet()
    found = ours.restore_checkpoint(folder, tree(0, mesh_shape, plain=plain), step)
    return found["n"], _wrong(found, tree(found["n"], mesh_shape, plain=plain))


def _wrong(found: Any, expected: Any) -> list[str]:
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    return [jax.tree_util.keystr(path) for (path, leaf), wanted in pairs if not _is_same(leaf, wanted)]


def _is_same(leaf: Any, wanted: Any) -> bool:
    if not isinstance(wanted, jax.Array) or wanted.is_fully_replicated:
        return bool(np.array_equal(np.asarray(leaf), np.asarray(wanted)))
    ours_of, theirs = leaf.addressable_shards, wanted.addressable_shards
    return (leaf.dtype, leaf.shape, leaf.sharding) == (wanted.dtype, wanted.shape, wanted.sharding) and all(
        np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()
        for one, other in zip(ours_of, theirs, strict=True)
    )
