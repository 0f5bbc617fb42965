"""The user's tree as a backend takes it: checked, in the order that is stored, and, for the background, copied."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np

from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.memo import AddressableMemo
from flax_ckpt_compat._core.tree import Branch, HostCopy, KeyData, Node, Path, Shard, normalize_index, show_path
from flax_ckpt_compat._save import agreement
from flax_ckpt_compat._save.host_copies import Copies
from flax_ckpt_compat._save.request import SaveRequest
from flax_ckpt_compat._trees import depth, state_dict
from flax_ckpt_compat._trees.plain_values import plain
from flax_ckpt_compat.errors import MPACheckpointingRequiredError


def tree_to_save(target: Any, request: SaveRequest, *, copied: bool, together: bool = False) -> Node:
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
    in_order = request.sort_keys and request.format is Format.MSGPACK
    copies = Copies() if copied else None
    taker = _Taker(request, copies, together=together, in_order=in_order)
    tree = taker.node(state_dict.describe(target), ())
    depth.check(taker.levels, request.path)
    if copies is not None:
        copies.make()
    return tree


class _Taker:
    """Takes the leaves of one tree, and asks jax once for each type of leaf."""

    def __init__(self, request: SaveRequest, copies: Copies | None, *, together: bool, in_order: bool):
        """For the arguments see `tree_to_save`.

        Args:
            request: the save.
            copies: takes what is to be copied, or None.
            together: other processes save it too.
            in_order: names sorted as text; '10' before '2' in lists too, as Flax 0.12.8 writes them (measured).
        """
        self._request, self._copies, self._together, self._in_order = request, copies, together, in_order
        # Types of leaves that are taken as they are, and those of jax's arrays whose sharding is yet to be looked at.
        self._plain: set[type] = set()
        self._arrays: set[type] = set()
        self._sight = AddressableMemo()
        self.levels = 0  # of the deepest branch met

    def node(self, node: Node, path: Path) -> Node:
        """A node, of which the branches are made anew."""
        if not isinstance(node, Branch):
            return self._leaf(node, path)
        self.levels = max(self.levels, len(path) + 1)
        children = {}
        for name in sorted(node.children) if self._in_order else node.children:
            child = node.children[name]
            if type(child) in self._plain or (type(child) in self._arrays and self._is_ready(child)):
                children[name] = child
            else:
                children[name] = self.node(child, (*path, name))
        return (
            Branch(children, int_keys=node.int_keys)
            if self._in_order
            else Branch(children, node.container, node.int_keys)
        )

    def _is_ready(self, array: jax.Array) -> bool:
        return self._sight.is_fully_addressable(array) and not array.is_deleted()

    def _leaf(self, leaf: Any, path: Path) -> Any:
        taken = _readable(path, plain(leaf, path), self._request, self._together)
        apart = state_dict.key_apart(taken)
        if self._copies is not None:
            return _frozen(apart, self._copies)
        if apart is taken and type(taken) is type(leaf):
            (self._arrays if isinstance(taken, jax.Array) else self._plain).add(type(taken))
        return apart


def _readable(path: Path, leaf: Any, request: SaveRequest, together: bool) -> Any:
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
    if together:
        return _of_several(path, leaf)
    if leaf.is_fully_replicated and leaf.addressable_shards:
        return leaf.addressable_data(0)
    what = "" if request.step is None else f"step {request.step} "
    raise MPACheckpointingRequiredError(
        f"cannot save {what}to {request.path}: {show_path(path)} is spread over several processes and "
        "this one sees only a part of it; use save_checkpoint_multiprocess, called by all processes.",
        path=request.path,
        step=request.step,
        leaf=show_path(path),
    )


def _of_several(path: Path, leaf: jax.Array) -> Any:
    """An array of other processes: process 0 writes what it has whole, and each process its shards of the rest.

    Raises:
        UnsupportedLeafError: it lies on the devices of one other process, which takes it for its own.
    """
    owners = {int(device.process_index) for device in cast(Any, leaf.sharding).device_set}
    if 0 in owners and (leaf.is_fully_replicated or len(owners) == 1):
        return leaf.addressable_data(0) if leaf.addressable_shards else agreement.unseen(leaf)
    if len(owners) == 1:
        shown = show_path(path)
        raise UnsupportedLeafError(
            f"{shown} lies wholly on the devices of process {owners.pop()}, and process {jax.process_index()} sees "
            "nothing of it; spread or replicate it over several processes, or put it on process 0, before saving",
            leaf=shown,
        )
    return leaf


def _frozen(leaf: Any, copies: Copies) -> Any:
    """The leaf's values as they are when the copies are made, whatever is mutated or donated later."""
    if isinstance(leaf, KeyData):
        return KeyData(leaf.impl, _frozen(leaf.data, copies))
    if isinstance(leaf, jax.Array):
        return _host_copy(leaf, copies)
    if type(leaf) is np.ndarray and agreement.is_unseen(leaf):
        return leaf
    if type(leaf) is np.ndarray and not leaf.dtype.hasobject:
        return copies.of(leaf)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _host_copy(array: jax.Array, copies: Copies) -> HostCopy:
    array.copy_to_host_async()
    if array.is_fully_replicated and array.is_fully_addressable:
        return HostCopy.whole(copies.of(np.asarray(array.addressable_data(0))), array.sharding)
    # Replicas hold the same values, so one of them is enough.
    shards = tuple(
        Shard(normalize_index(shard.index, array.shape), copies.of(np.asarray(shard.data)))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    )
    return HostCopy(array.shape, array.dtype, shards, array.sharding)
