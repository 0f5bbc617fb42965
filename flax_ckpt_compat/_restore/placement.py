"""Give stored values their final form: casts, devices, PRNG keys, containers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle, LeafKind
from flax_ckpt_compat._core.memo import Memo
from flax_ckpt_compat._core.tree import Branch, Container, KeyData, Node, normalize_index, show_path
from flax_ckpt_compat._restore import cast_losses, casting, scalar_kinds, target_shardings
from flax_ckpt_compat._trees import state_dict

# Sentinel: the leaf needs casting, resharding or key handling.
NOT_SIMPLE: Any = object()


class Targets:
    """Cache of shardings for arrays that only have to be put on one device, or nowhere; asks jax once per sharding."""

    def __init__(self) -> None:
        # True for jax's arrays, False for types without a sharding, None for abstract arrays.
        self._types = Memo(_is_array_type)
        self._places = Memo(_place)
        self._held = Memo(is_held)
        self._device_count = 0

    def simple(self, target: Any, dtype: Any, rank: int, on_device: bool) -> Any:
        """Return the sharding that an uncast array is put on.

        Args:
            target: the target's leaf, or None.
            dtype: of the stored array.
            rank: of the stored array.
            on_device: see `TargetLeafSpec`.

        Returns:
            A sharding of one device, the same object for equal ones; None if the array stays in host memory; or
            `NOT_SIMPLE`.
        """
        is_array = self._types[type(target)]
        if not is_array:
            return None if is_array is False else NOT_SIMPLE
        if not on_device and self._is_one_device():
            return None
        # Most are equal to the one before, and few are the same.
        sharding, is_single, least = self._places.of(target.sharding)
        if is_single and not on_device:
            return None
        simple = is_single and rank >= least and self._held[dtype] and isinstance(target.dtype, np.dtype)
        return sharding if simple else NOT_SIMPLE

    def _is_one_device(self) -> bool:
        # Lazy: device_count starts jax's backends.
        self._device_count = self._device_count or jax.device_count()
        return self._device_count == 1


def _is_array_type(kind: type) -> bool | None:
    return None if issubclass(kind, jax.ShapeDtypeStruct | jax.core.Tracer) else issubclass(kind, jax.Array)


def _place(sharding: Any) -> tuple[Any, bool, int]:
    """Return a sharding, whether it is one local device, and the least rank that it needs."""
    is_single = sharding.is_fully_addressable and len(sharding.device_set) == 1
    return sharding, is_single, len(getattr(sharding, "spec", ()))


class TargetLeafSpec:
    """Dtype and sharding that a target's leaf asks for.

    Attributes:
        target: the target's leaf, or None.
        sharding: sharding of the value; None for a numpy array in host memory.
        is_checked: record values lost in a cast: the caller asked for casts, not for this dtype.
        is_lossy: values were lost in a cast.
    """

    __slots__ = ("_cast", "is_checked", "is_lossy", "sharding", "target")

    def __init__(self, target: Any, cast: bool, on_device: bool):
        """Read a target's leaf.

        Args:
            target: the target's leaf, or None.
            cast: cast arrays to the target's dtype; `jax.ShapeDtypeStruct` targets always do.
            on_device: use any sharding of the target; else only an explicit one: of an abstract leaf, or of an array
                on several devices.
        """
        self.target = target
        self._cast = cast or isinstance(target, jax.ShapeDtypeStruct)
        self.is_checked, self.is_lossy = cast, False
        self.sharding = target_shardings.wanted(target, on_device)

    def dtype(self, stored: Any) -> Any:
        """Return the dtype that an array of dtype ``stored`` is cast to."""
        wanted = getattr(self.target, "dtype", None) if self._cast and not state_dict.is_prng_key(self.target) else None
        return stored if wanted is None else wanted

    def place(self, value: np.ndarray[Any, Any]) -> Any:
        """Cast and place an array.

        Raises:
            DtypeMismatchError: there is no such cast.
        """
        value = self.cast(value)
        if self.sharding is None or not is_held(value.dtype):
            return value
        if not self.sharding.addressable_devices:
            return state_dict.without_shards(value.shape, value.dtype, self.sharding)
        with transfers_allowed():
            return on_devices(value, self.sharding)

    def cast(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Cast an array to the target's dtype."""
        dtype = self.dtype(value.dtype)
        if dtype == value.dtype:
            return value
        cast = casting.Cast(dtype, self.is_checked)
        value = cast(value)
        self.is_lossy = self.is_lossy or cast.is_lossy
        return value


class LeafPlacement:
    """Reads and placement of one stored leaf.

    Attributes:
        handle: the leaf's handle.
        reads: the handle, or one slice per distinct shard on this process's devices; empty if all shards are elsewhere.
    """

    __slots__ = ("_spec", "handle", "reads")

    def __init__(self, handle: LeafHandle, spec: TargetLeafSpec):
        """Plan the reads.

        Args:
            handle: of the leaf.
            spec: the target's; its sharding, if any, fits the stored shape.
        """
        self.handle, self._spec = handle, spec
        is_array = handle.kind is LeafKind.ARRAY and not state_dict.is_prng_key(spec.target)
        indices = self._shard_indices() if is_array else []
        self.reads: list[LeafHandle | ArraySlice] = [ArraySlice(handle, index) for index in indices] or [handle]
        if is_array and self._is_elsewhere():
            self.reads = []

    def finalize(self, values: list[Any]) -> Any:
        """Return the leaf in its final form.

        Args:
            values: the values of `reads`.
        """
        if not self.reads:
            return state_dict.without_shards(self.handle.shape, self.dtype, self._spec.sharding)
        if isinstance(self.reads[0], ArraySlice):
            return self._sharded(values)
        target = self._spec.target
        value, handle = scalar_kinds.resolve_scalar_kind(values[0], self.handle, target)
        if isinstance(value, KeyData):
            try:
                with all_transfers_allowed():
                    return state_dict.join_key(value, self._spec.sharding)
            except ValueError:
                if state_dict.has_implementation(value.impl):
                    raise
                return scalar_kinds.data_of_unknown_key(value, handle, target)
        if handle.kind is LeafKind.ARRAY:
            return self._spec.place(np.asarray(value))
        return self._scalar(value, handle)

    def _scalar(self, value: Any, handle: LeafHandle) -> Any:
        """Return a number, text or bytes; convert or cast a number if the target asks for that."""
        spec = self._spec
        if not scalar_kinds.is_converted(handle, spec.target, spec.is_checked):
            return value
        # Checking one number is cheap, so warn only about values that are lost, not about those that might be.
        spec.is_checked = True
        array = np.asarray(value)
        if scalar_kinds.wants_array(spec.target):
            return spec.place(array)
        cast = casting.Cast(scalar_kinds.number_dtype(spec.target), True)
        number = cast(array)
        spec.is_lossy = cast.is_lossy
        return number[()] if isinstance(spec.target, np.generic) else number.item()

    @property
    def is_lossy(self) -> bool:
        """Return whether a cast lost values."""
        return self._spec.is_lossy

    @property
    def dtype(self) -> Any:
        """Return the dtype after the cast, if any."""
        return self._spec.dtype(self.handle.dtype)

    @property
    def is_placed(self) -> bool:
        """Return whether the leaf goes to a sharding."""
        return self._spec.sharding is not None

    @property
    def narrowed(self) -> str | None:
        """Return the leaf and dtypes of an abstract target's cast that may lose values, or None."""
        stored = self.handle.dtype
        is_abstract = isinstance(self._spec.target, jax.ShapeDtypeStruct)
        if self.handle.kind is not LeafKind.ARRAY or stored is None or not is_abstract:
            return None
        wanted = self._spec.dtype(stored)
        return None if cast_losses.is_safe(stored, wanted) else f"{show_path(self.handle.path)}: {stored} to {wanted}"

    def _shard_indices(self) -> list[tuple[slice, ...]]:
        """Return the indices of the distinct local shards, or nothing if the array is read whole."""
        shape, sharding = self.handle.shape, self._spec.sharding
        if (
            sharding is None
            or sharding.is_fully_replicated
            or 0 in shape
            or not is_held(self._spec.dtype(self.handle.dtype))
        ):
            return []
        indices = sharding.addressable_devices_indices_map(shape).values()
        shards = {_key(index): index for index in (normalize_index(index, shape) for index in indices)}
        return list(shards.values())

    def _is_elsewhere(self) -> bool:
        """Return whether all shards of the array go to devices of other processes."""
        sharding = self._spec.sharding
        return sharding is not None and not sharding.addressable_devices and is_held(self.dtype)

    def _sharded(self, values: list[Any]) -> jax.Array:
        """Assemble a sharded array; each value goes to all devices that hold its shard."""
        shape = self.handle.shape
        shards: dict[Any, np.ndarray[Any, Any]] = {
            _key(part.index): self._spec.cast(value)
            for part, value in zip(self.reads, values, strict=True)
            if isinstance(part, ArraySlice)
        }

        def shard(index: Any) -> np.ndarray[Any, Any]:
            return shards[_key(normalize_index(index, shape))]

        sharding: Any = self._spec.sharding
        with transfers_allowed():
            return jax.make_array_from_callback(shape, sharding, shard)


def _key(index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((side.start, side.stop) for side in index)  # slices have no hash


def transfers_allowed() -> Any:
    """Allow host-to-device transfers in a context: a restore is an explicit transfer, whatever the caller's guard."""
    return jax.transfer_guard_host_to_device("allow")


def all_transfers_allowed() -> Any:
    """Allow all transfers in a context, device to device too; slower to enter."""
    return jax.transfer_guard("allow")


def on_devices(value: np.ndarray[Any, Any], sharding: Any) -> Any:
    """Put an array on a sharding's devices; the CPU backend may take over its memory."""
    # Also for one device: takes half the time of jax.device_put.
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def is_held(dtype: Any) -> bool:
    """Return whether jax holds arrays of this dtype without narrowing them (64 bits need x64)."""
    return _can_be_held(np.dtype(dtype), jax.dtypes.canonicalize_dtype(np.float64))


@functools.cache
def _can_be_held(dtype: np.dtype[Any], widest: Any) -> bool:  # noqa: ARG001  (x64 can be switched on and off)
    """Return whether jax has the dtype and keeps it; cached per x64 mode."""
    try:
        kept = jax.eval_shape(lambda x: x, np.zeros((), dtype)).dtype
    except TypeError:
        return False
    return bool(kept == dtype)


def as_state(node: Node, *, lists: bool = False) -> Any:
    """Convert to nested dicts with text keys, as Flax restores without a target: lists become dicts of '0', '1', …

    Args:
        node: branches and values.
        lists: lists stay lists. Flax writes no msgpack arrays, and restores those of other writers as lists.
    """
    if not isinstance(node, Branch):
        return node
    children = {name: as_state(child, lists=lists) for name, child in node.children.items()}
    return list(children.values()) if lists and node.container is Container.LIST else children


def as_stored(node: Node) -> Any:
    """Convert to lists, tuples and int keys where the format recorded them (setting ``structure="stored"``)."""
    if not isinstance(node, Branch):
        return node
    children = {name: as_stored(child) for name, child in node.children.items()}
    if node.container is Container.LIST:
        return list(children.values())
    if node.container is Container.TUPLE:
        return tuple(children.values())
    return {int(name) if name in node.int_keys else name: child for name, child in children.items()}
