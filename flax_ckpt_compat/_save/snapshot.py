"""Convert the user's tree for a backend: validated, in stored order, and copied for an async save."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np

from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.memo import AddressableMemo
from flax_ckpt_compat._core.tree import Branch, HostCopy, KeyData, Node, Path, Shard, normalize_index, show_path
from flax_ckpt_compat._save import tree_summary
from flax_ckpt_compat._save.host_copies import Copies
from flax_ckpt_compat._save.request import SaveRequest
from flax_ckpt_compat._trees import depth, state_dict
from flax_ckpt_compat._trees.plain_values import plain
from flax_ckpt_compat.errors import MPACheckpointingRequiredError


def tree_to_save(target: Any, request: SaveRequest, *, copy: bool, multiprocess: bool = False) -> Node:
    """Return the neutral tree of a user's tree.

    Args:
        target: the user's tree.
        request: the save.
        copy: copy all values, so that later mutation or donation does not change what is saved.
        multiprocess: all processes save the tree, so arrays may be spread over them.

    Raises:
        UnsupportedLeafError: a leaf has no values, or the tree has no state.
        MPACheckpointingRequiredError: an array is spread over processes in a save by one process.
    """
    in_order = request.sort_keys and request.format is Format.MSGPACK
    copies = Copies() if copy else None
    snapshot = _Snapshot(request, copies, multiprocess=multiprocess, in_order=in_order)
    tree = snapshot.node(state_dict.describe(target), ())
    depth.check(snapshot.levels, request.path)
    if copies is not None:
        copies.make()
    return tree


class _Snapshot:
    """Converter of one tree; remembers which types of leaves need no conversion."""

    def __init__(self, request: SaveRequest, copies: Copies | None, *, multiprocess: bool, in_order: bool):
        """Start a snapshot.

        Args:
            request: the save.
            copies: collects the arrays to copy; None copies nothing.
            multiprocess: see `tree_to_save`.
            in_order: sort names as text; '10' before '2' in lists too, as Flax 0.12.8 writes them (measured).
        """
        self._request, self._copies, self._multiprocess, self._in_order = request, copies, multiprocess, in_order
        # Types of leaves that need no conversion, and types of jax arrays that need none if fully addressable.
        self._simple_types: set[type] = set()
        self._array_types: set[type] = set()
        self._addressable = AddressableMemo()
        self.levels = 0  # depth of the tree so far

    def node(self, node: Node, path: Path) -> Node:
        """Convert a node and all below it; branches are new objects."""
        if not isinstance(node, Branch):
            return self._leaf(node, path)
        self.levels = max(self.levels, len(path) + 1)
        children = {}
        for name in sorted(node.children) if self._in_order else node.children:
            child = node.children[name]
            if type(child) in self._simple_types or (type(child) in self._array_types and self._is_ready(child)):
                children[name] = child
            else:
                children[name] = self.node(child, (*path, name))
        return (
            Branch(children, int_keys=node.int_keys)
            if self._in_order
            else Branch(children, node.container, node.int_keys)
        )

    def _is_ready(self, array: jax.Array) -> bool:
        return self._addressable.is_fully_addressable(array) and not array.is_deleted()

    def _leaf(self, leaf: Any, path: Path) -> Any:
        taken = _checked(path, plain(leaf, path), self._request, self._multiprocess)
        apart = state_dict.split_key(taken)
        if self._copies is not None:
            return _copied(apart, self._copies)
        if apart is taken and type(taken) is type(leaf):
            (self._array_types if isinstance(taken, jax.Array) else self._simple_types).add(type(taken))
        return apart


def _checked(path: Path, leaf: Any, request: SaveRequest, multiprocess: bool) -> Any:
    """Return the leaf if it has values that this process can read, alone or, in a multi-process save, in part."""
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
    if multiprocess:
        return _from_processes(path, leaf)
    if leaf.is_fully_replicated and leaf.addressable_shards:
        return leaf.addressable_data(0)
    step_text = "" if request.step is None else f"step {request.step} "
    raise MPACheckpointingRequiredError(
        f"cannot save {step_text}to {request.path}: {show_path(path)} is spread over several processes and "
        "this one sees only a part of it; use save_checkpoint_multiprocess, called by all processes.",
        path=request.path,
        step=request.step,
        leaf=show_path(path),
    )


def _from_processes(path: Path, leaf: jax.Array) -> Any:
    """Return what this process saves of an array that spans processes; process 0 alone writes what it has whole.

    Raises:
        UnsupportedLeafError: the array lies on the devices of one other process, for which it looks local.
    """
    owners = {int(device.process_index) for device in cast(Any, leaf.sharding).device_set}
    if 0 in owners and (leaf.is_fully_replicated or len(owners) == 1):
        return leaf.addressable_data(0) if leaf.addressable_shards else tree_summary.placeholder(leaf)
    if len(owners) == 1:
        shown = show_path(path)
        raise UnsupportedLeafError(
            f"{shown} lies wholly on the devices of process {owners.pop()}, and process {jax.process_index()} sees "
            "nothing of it; spread or replicate it over several processes, or put it on process 0, before saving",
            leaf=shown,
        )
    return leaf


def _copied(leaf: Any, copies: Copies) -> Any:
    """Return a copy of the leaf on the host; its values are filled in by `Copies.make`."""
    if isinstance(leaf, KeyData):
        return KeyData(leaf.impl, _copied(leaf.data, copies))
    if isinstance(leaf, jax.Array):
        return _host_copy(leaf, copies)
    if type(leaf) is np.ndarray and tree_summary.is_placeholder(leaf):
        return leaf
    if type(leaf) is np.ndarray and not leaf.dtype.hasobject:
        return copies.add(leaf)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _host_copy(array: jax.Array, copies: Copies) -> HostCopy:
    array.copy_to_host_async()
    if array.is_fully_replicated and array.is_fully_addressable:
        return HostCopy.whole(copies.add(np.asarray(array.addressable_data(0))), array.sharding)
    # Replicas hold the same values, so one of them is enough.
    shards = tuple(
        Shard(normalize_index(shard.index, array.shape), copies.add(np.asarray(shard.data)))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    )
    return HostCopy(array.shape, array.dtype, shards, array.sharding)
