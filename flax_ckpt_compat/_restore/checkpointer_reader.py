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
from flax_ckpt_compat._core.backend import KIND_OF_TYPE, Format, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CheckpointerError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.tree import Branch, KeyData, Node, Path, map_leaves
from flax_ckpt_compat._save.checkpointer_adapter import described
from flax_ckpt_compat._trees import prng_keys, state_dict

_KINDS = {**KIND_OF_TYPE, bytes: LeafKind.BYTES, KeyData: LeafKind.PRNG_KEY}
_EXAMPLES = {LeafKind.BOOL: False, LeafKind.INT: 0, LeafKind.FLOAT: 0.0}
_ABSENT = object()


class CheckpointerReader(backend.Reader):
    """Reader of what the caller's checkpointer restored, with the tree of our own reader, if that opens it.

    Orbax's handlers leave out leaves that they have no example for, and return numpy scalars as Python numbers. Values
    that do not have the stored type are read by our own reader."""

    format = Format.ORBAX
    places_on_device, keeps_lists = True, False

    def __init__(self, checkpointer: Any, checkpoint: Location, item: str, own: backend.Reader | None):
        """Restore an item of a checkpoint, '' for its only tree; ``own`` is our reader of it, if there is one."""
        self.location, self._own = checkpoint / item if item else checkpoint, own
        if item and "CompositeCheckpointHandler" in _handler_names(checkpointer):
            values = _restored_by(checkpointer, checkpoint.path)[item]
        else:
            values = _restored_by(checkpointer, self.path, **_arguments(checkpointer, own))
        if own is None:
            self.tree: Node = map_leaves(self._leaf, state_dict.describe(values))
        else:
            self.tree = map_leaves(lambda path, leaf: self._with_value(leaf, _at(values, path)), own.tree)

    def read(self, handles: Sequence[LeafHandle], *, mapped: bool = False) -> list[Any]:  # noqa: ARG002
        """Return the values of handles of the tree, or slices of them, in order; arrays in host memory."""
        return [one.cut(one.locator) for one in handles]

    def close(self) -> None:
        """Close our own reader."""
        if self._own is not None:
            self._own.close()

    def _with_value(self, leaf: Any, value: Any) -> Any:
        """Return a stored leaf with the checkpointer's value, if that has the stored type or only it reads the leaf."""
        if not isinstance(leaf, LeafHandle) or value is _ABSENT:
            return leaf
        given = self._leaf(leaf.path, value)
        if leaf.kind is LeafKind.UNSUPPORTED:
            return given
        is_number = leaf.kind is LeafKind.NUMPY_SCALAR
        is_same = isinstance(given, LeafHandle) and given.kind is leaf.kind
        return given if is_same and not (is_number and given.dtype != leaf.dtype) else leaf

    def _leaf(self, path: Path, value: Any) -> Any:
        """Return the handle of a value; None and empty containers are themselves."""
        if value is None or isinstance(value, Branch):
            return value
        value = prng_keys.split_key(value)
        if isinstance(value, KeyData):
            return LeafHandle(path, LeafKind.PRNG_KEY, value.data.shape, value.data.dtype, 0, None, self, value)
        if isinstance(value, np.ndarray | jax.Array):
            array = np.asarray(value)
            if not (array.flags.writeable and array.flags.c_contiguous):
                array = np.array(array, order="C")
            return LeafHandle(path, LeafKind.ARRAY, array.shape, array.dtype, array.nbytes, None, self, array)
        if isinstance(value, np.generic):
            return LeafHandle(path, LeafKind.NUMPY_SCALAR, (), value.dtype, value.nbytes, None, self, value)
        return LeafHandle(path, _KINDS.get(type(value), LeafKind.UNSUPPORTED), (), None, 0, None, self, value)


def _handler_names(checkpointer: Any) -> set[str]:
    return {kind.__name__ for kind in type(getattr(checkpointer, "handler", None)).__mro__}


def _arguments(checkpointer: Any, own: backend.Reader | None) -> Mapping[str, Any]:
    """Return arguments that make known handlers read arrays to the host, whatever devices they were saved from."""
    if own is None:
        return {}
    names = _handler_names(checkpointer)
    if "PyTreeCheckpointHandler" in names:
        arguments = map_leaves(lambda _, leaf: _restore_args(leaf), own.tree)
        return {"restore_args": state_dict.from_stored(arguments, None, "orbax")}
    if "StandardCheckpointHandler" in names:
        examples = state_dict.from_stored(map_leaves(lambda _, leaf: _example(leaf), own.tree), None, "orbax")
        # A plain ``Checkpointer`` passes an item on to its handler.
        takes_target = "target" in inspect.signature(type(checkpointer).restore).parameters
        return {"target" if takes_target else "item": examples}
    return {}


def _restored_by(checkpointer: Any, path: str, **arguments: Any) -> Any:
    """Restore with a checkpointer, alone if it gets no arguments; its errors say what to do."""
    try:
        return checkpointer.restore(path, **arguments)
    except Exception as error:  # handlers raise anything, and say little about the file
        raise CheckpointerError(
            f"{path}: the given orbax_checkpointer ({described(checkpointer)}) cannot restore it: {error}; "
            f"give the one that wrote it, or leave orbax_checkpointer out: what Orbax wrote is read without it",
            path=path,
        ) from error


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


def _at(tree: Any, path: Path) -> Any:
    try:
        for name in path:
            tree = tree[int(name)] if isinstance(tree, (list, tuple)) else tree[name]
    except (LookupError, TypeError, ValueError):
        return _ABSENT
    return tree
