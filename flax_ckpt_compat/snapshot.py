"""The user's tree as a backend takes it: checked, in the order that is stored, and, for the background, copied."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flax_ckpt_compat import state
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.tree import Branch, HostCopy, KeyData, Node, Path, Shard, box_of, map_leaves, show_path
from flax_ckpt_compat.errors import MPACheckpointingRequiredError
from flax_ckpt_compat.request import Request


def tree_to_save(target: Any, request: Request, *, copied: bool, together: bool = False) -> Node:
    """The neutral tree of a user's tree.

    Args:
        target: the user's.
        request: the save.
        copied: with the values as they are now, whatever is mutated or donated later.
        together: other processes save it too, so that arrays may be spread over them.

    Raises:
        UnsupportedLeafError: a leaf that has no values, or a tree without a state.
        MPACheckpointingRequiredError: an array that is spread over processes, and is not saved together.
    """
    tree = state.describe(target)
    tree = map_leaves(lambda path, leaf: _readable(path, leaf, request, together), tree)
    in_order = request.sort_keys and request.format is Format.MSGPACK
    tree = state.take_keys_apart(_sorted(tree) if in_order else tree)
    return map_leaves(lambda _, leaf: _frozen(leaf), tree) if copied else tree


def _readable(path: Path, leaf: Any, request: Request, together: bool) -> Any:
    """The leaf, checked to have values, and to be wholly readable from this process unless others save it too."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise UnsupportedLeafError(f"{show_path(path)} is abstract (a ShapeDtypeStruct) and has no values to save")
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedLeafError(
            f"{show_path(path)} has no value yet (a Tracer): save_checkpoint was called inside of jit or another "
            "transformation; return the state from it, and save outside of it",
            leaf=show_path(path),
        )
    if not isinstance(leaf, jax.Array):
        return leaf
    if leaf.is_deleted():
        raise UnsupportedLeafError(
            f"{show_path(path)} was deleted, most likely donated to a jitted function; save before that call"
        )
    if leaf.is_fully_addressable:
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    if together:
        return leaf
    what = "" if request.step is None else f"step {request.step} "
    raise MPACheckpointingRequiredError(
        f"cannot save {what}to {request.path}: {show_path(path)} is spread over several processes and "
        "this one sees only a part of it; use save_checkpoint_multiprocess, called by all processes.",
        path=request.path,
        step=request.step,
        leaf=show_path(path),
    )


def _frozen(leaf: Any) -> Any:
    """The leaf's values as they are now, whatever is mutated or donated later."""
    if isinstance(leaf, KeyData):
        return KeyData(leaf.impl, _frozen(leaf.data))
    if isinstance(leaf, jax.Array):
        return _host_copy(leaf)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _host_copy(array: jax.Array) -> HostCopy:
    if array.is_fully_replicated:
        return HostCopy.whole(np.array(array.addressable_data(0), order="C"), array.sharding)
    array.copy_to_host_async()
    # Replicas hold the same values, so one of them is enough.
    shards = tuple(
        Shard(box_of(shard.index, array.shape), np.array(shard.data, order="C"))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    )
    return HostCopy(array.shape, array.dtype, shards, array.sharding)


def _sorted(tree: Node) -> Node:
    """The tree with all names sorted as text; '10' before '2' in lists too, as Flax 0.12.8 writes them (measured)."""
    if not isinstance(tree, Branch):
        return tree
    return Branch({name: _sorted(tree.children[name]) for name in sorted(tree.children)}, int_keys=tree.int_keys)
