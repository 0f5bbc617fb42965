"""Read checkpoints through Orbax checkpointer objects that callers pass in.

Never imports orbax: the caller has imported it to make the object.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core import backend
from flax_ckpt_compat._core.backend import KIND_OF_TYPE, ArraySlice, Format, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CheckpointerError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import KeyData, Node, Path, iter_leaves, map_leaves
from flax_ckpt_compat._save.checkpointer_adapter import described
from flax_ckpt_compat._trees import prng_keys, state_dict

_TYPES = {kind: python for python, kind in KIND_OF_TYPE.items()} | {LeafKind.BYTES: bytes, LeafKind.PRNG_KEY: KeyData}
_EXAMPLES = {LeafKind.BOOL: False, LeafKind.INT: 0, LeafKind.FLOAT: 0.0}
_ABSENT = object()


class CheckpointerReader(backend.Reader):
    """Reader over the caller's checkpointer; the tree comes from our own metadata reader.

    Orbax's handlers leave out leaves that they have no example for, and return numpy scalars as Python numbers. Values
    that do not have the stored type are read by our own reader.
    """

    format = Format.ORBAX
    places_on_device, keeps_lists = True, False

    def __init__(self, checkpointer: Any, location: Location, tree: Node, own: backend.Reader | None = None):
        """Wrap an Orbax checkpointer; ``own`` is our reader of the same checkpoint, if there is one."""
        self.location, self.tree = location, tree
        self._checkpointer, self._own = checkpointer, own

    def read(self, handles: Sequence[LeafHandle | ArraySlice], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """Return the values of handles of the tree, or slices of them, in order; arrays in host memory."""
        restored = restore_with(self._checkpointer, self.path, **self._arguments())
        paths = {leaf: path for path, leaf in iter_leaves(self.tree) if isinstance(leaf, LeafHandle)}
        whole = [one.handle if isinstance(one, ArraySlice) else one for one in handles]
        values = [_in_memory(_at(restored, paths[handle]), handle) for handle in whole]
        if self._own is not None:
            wrong = [number for number, value in enumerate(values) if not _is_as_stored(value, whole[number])]
            for number, value in zip(wrong, self._own.read([whole[number] for number in wrong]), strict=True):
                values[number] = value
        return [
            one.cut(value) if isinstance(one, ArraySlice) else value for one, value in zip(handles, values, strict=True)
        ]

    def _arguments(self) -> Mapping[str, Any]:
        """Return arguments that make known handlers read arrays to the host, whatever devices they were saved from."""
        handler = type(getattr(self._checkpointer, "handler", None)).__mro__
        names = {kind.__name__ for kind in handler}
        if "PyTreeCheckpointHandler" in names:
            return {"restore_args": state_dict.nested(map_leaves(lambda _, leaf: _restore_args(leaf), self.tree))}
        if "StandardCheckpointHandler" in names:
            examples = state_dict.nested(map_leaves(lambda _, leaf: _example(leaf), self.tree))
            return {"target" if _takes_target(self._checkpointer) else "item": examples}
        return {}


def opened_by(checkpointer: Any, location: Location, own: backend.Reader | None) -> CheckpointerReader:
    """Return the reader of a checkpoint that a checkpointer restores; ``own`` is our reader of it, if there is one."""
    tree = state_dict.describe(restore_with(checkpointer, location.path)) if own is None else own.tree
    return CheckpointerReader(checkpointer, location, tree, own)


def restore_with(checkpointer: Any, path: str, **arguments: Any) -> Any:
    """Restore with a checkpointer, alone if it gets no arguments; its errors say what to do."""
    try:
        return checkpointer.restore(path, **arguments)
    except Exception as error:  # handlers raise anything, and say little about the file
        raise CheckpointerError(
            f"{path}: the given orbax_checkpointer ({described(checkpointer)}) cannot restore it: {error}; "
            f"give the one that wrote it, or leave orbax_checkpointer out: what Orbax wrote is read without it",
            path=path,
        ) from error


def _takes_target(checkpointer: Any) -> bool:
    """Return whether ``restore`` itself takes a target; a plain ``Checkpointer`` passes an item on to its handler."""
    return "target" in inspect.signature(type(checkpointer).restore).parameters


def _restore_args(leaf: Any) -> Any:
    orbax: Any = sys.modules["orbax.checkpoint"]
    kind = leaf.kind if isinstance(leaf, LeafHandle) else None
    if kind is LeafKind.ARRAY:
        return orbax.RestoreArgs(restore_type=np.ndarray)
    if kind is LeafKind.PRNG_KEY:  # restores as a jax.Array only, and by default where it was saved
        return orbax.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
    return orbax.RestoreArgs()


def _example(leaf: Any) -> Any:
    """Return an example of the leaf's type that takes no memory."""
    if not isinstance(leaf, LeafHandle):
        return leaf
    if leaf.kind is LeafKind.ARRAY:
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return _EXAMPLES.get(leaf.kind)


def _in_memory(value: Any, handle: LeafHandle) -> Any:
    """Convert a value to what our own readers return: writable arrays, PRNG keys as `KeyData`."""
    if prng_keys.is_prng_key(value):
        return prng_keys.split_key(value)
    if handle.kind is not LeafKind.ARRAY or value is None or value is _ABSENT:
        return value
    array = np.asarray(value)
    return array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")


def _is_as_stored(value: Any, handle: LeafHandle) -> bool:
    if handle.kind is LeafKind.ARRAY:
        return isinstance(value, np.ndarray)
    if handle.kind is LeafKind.NUMPY_SCALAR:
        return isinstance(value, np.generic) and value.dtype == handle.dtype
    return type(value) is _TYPES.get(handle.kind)


def _at(tree: Any, path: Path) -> Any:
    try:
        for name in path:
            tree = tree[int(name)] if isinstance(tree, (list, tuple)) else tree[name]
    except (LookupError, TypeError, ValueError):
        return _ABSENT
    return tree
