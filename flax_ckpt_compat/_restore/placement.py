"""Stored values → what the caller gets: casting, devices, PRNG keys, and containers."""

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

# What only has to be put somewhere, or nowhere, is simple; this is all else.
NOT_SIMPLE: Any = object()


class Targets:
    """Which arrays only have to be put where a target's leaf is, or nowhere; asks jax once a type and sharding."""

    def __init__(self) -> None:
        # True for jax's arrays, False for what says nothing about places, None for what may say more.
        self._types = Memo(_is_array_type)
        self._places = Memo(_place)
        self._held = Memo(is_held)
        self._device_count = 0

    def simple(self, target: Any, dtype: Any, rank: int, on_device: bool) -> Any:
        """How an array that is not cast gets its final form.

        Args:
            target: the target's leaf, or None.
            dtype: of the stored array.
            rank: of the stored array.
            on_device: see `TargetLeafSpec`.

        Returns:
            The sharding of one device that it is put on, the same object for all that are equal; None where it stays
            in host memory; or `NOT_SIMPLE`.
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
        # Not asked before there is an array: the answer starts jax's backends.
        self._device_count = self._device_count or jax.device_count()
        return self._device_count == 1


def _is_array_type(kind: type) -> bool | None:
    return None if issubclass(kind, jax.ShapeDtypeStruct | jax.core.Tracer) else issubclass(kind, jax.Array)


def _place(sharding: Any) -> tuple[Any, bool, int]:
    """A sharding, whether an array of it is on one device of this process, and how many axes it has at least."""
    is_single = sharding.is_fully_addressable and len(sharding.device_set) == 1
    return sharding, is_single, len(getattr(sharding, "spec", ()))


class TargetLeafSpec:
    """The form that a target's leaf wants a value in: dtype and place.

    Attributes:
        target: the target's leaf, or None.
        sharding: where the value goes; None leaves it in host memory, as a numpy array.
        is_checked: values that a cast loses are noted, because the caller asked for casts and for no dtype.
        is_lossy: a cast lost values.
    """

    __slots__ = ("_cast", "is_checked", "is_lossy", "sharding", "target")

    def __init__(self, target: Any, cast: bool, on_device: bool):
        """Takes what the target says.

        Args:
            target: the target's leaf, or None.
            cast: cast arrays to the target's dtype; `jax.ShapeDtypeStruct` targets always do.
            on_device: give arrays the target's sharding, if it has one; else they stay numpy arrays unless the
                target asks for a sharding explicitly: an abstract leaf, or an array on several devices.
        """
        self.target = target
        self._cast = cast or isinstance(target, jax.ShapeDtypeStruct)
        self.is_checked, self.is_lossy = cast, False
        self.sharding = target_shardings.wanted(target, on_device)

    def dtype(self, stored: Any) -> Any:
        """What an array of this dtype is cast to."""
        wanted = getattr(self.target, "dtype", None) if self._cast and not state_dict.is_prng_key(self.target) else None
        return stored if wanted is None else wanted

    def place(self, value: np.ndarray[Any, Any]) -> Any:
        """The array, cast and placed.

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
        """Return the array in the dtype that the target wants."""
        dtype = self.dtype(value.dtype)
        if dtype == value.dtype:
            return value
        cast = casting.Cast(dtype, self.is_checked)
        value = cast(value)
        self.is_lossy = self.is_lossy or cast.is_lossy
        return value


class LeafPlacement:
    """One stored leaf that was asked for.

    Attributes:
        handle: its handle.
        asked: what of it has to be read: all, or each distinct shard that a device of this process shall hold; nothing
            where none of its devices shall hold any.
    """

    __slots__ = ("_form", "asked", "handle")

    def __init__(self, handle: LeafHandle, form: TargetLeafSpec):
        """Decides what has to be read.

        Args:
            handle: of the leaf.
            form: what the target's leaf wants; its sharding, if it has one, can hold the stored shape.
        """
        self.handle, self._form = handle, form
        boxes = self._boxes() if handle.kind is LeafKind.ARRAY and not state_dict.is_prng_key(form.target) else []
        self.asked: list[LeafHandle | ArraySlice] = [ArraySlice(handle, box) for box in boxes] or [handle]
        if self._is_elsewhere():
            self.asked = []

    def finalize(self, values: list[Any]) -> Any:
        """The leaf in its final form.

        Args:
            values: what the backend read of what was asked.
        """
        if not self.asked:
            return state_dict.without_shards(self.handle.shape, self.dtype, self._form.sharding)
        if isinstance(self.asked[0], ArraySlice):
            return self._sharded(values)
        target = self._form.target
        value, handle = scalar_kinds.resolve_scalar_kind(values[0], self.handle, target)
        if isinstance(value, KeyData):
            try:
                with all_transfers_allowed():
                    return state_dict.put_key_together(value, self._form.sharding)
            except ValueError:
                if state_dict.has_implementation(value.impl):
                    raise
                return scalar_kinds.data_of_unknown_key(value, handle, target)
        if handle.kind is LeafKind.ARRAY:
            return self._form.place(np.asarray(value))
        return self._scalar(value, handle)

    def _scalar(self, value: Any, handle: LeafHandle) -> Any:
        """A number, text or bytes; a number as an array, or cast, if the target asks for that."""
        form = self._form
        if not scalar_kinds.is_converted(handle, form.target, form.is_checked):
            return value
        # Whether one number fits is quickly seen, so nothing is warned of that only might be lost.
        form.is_checked = True
        array = np.asarray(value)
        if scalar_kinds.wants_array(form.target):
            return form.place(array)
        cast = casting.Cast(scalar_kinds.number_dtype(form.target), True)
        number = cast(array)
        form.is_lossy = cast.is_lossy
        return number[()] if isinstance(form.target, np.generic) else number.item()

    @property
    def is_lossy(self) -> bool:
        """Whether a cast lost values."""
        return self._form.is_lossy

    @property
    def dtype(self) -> Any:
        """What the array is cast to, or has anyway."""
        return self._form.dtype(self.handle.dtype)

    @property
    def is_placed(self) -> bool:
        """Whether the target says which devices it goes to."""
        return self._form.sharding is not None

    @property
    def narrowed(self) -> str | None:
        """How the cast that an abstract target asks for may lose values, or None; the setting asks for it outright."""
        stored = self.handle.dtype
        is_abstract = isinstance(self._form.target, jax.ShapeDtypeStruct)
        if self.handle.kind is not LeafKind.ARRAY or stored is None or not is_abstract:
            return None
        wanted = self._form.dtype(stored)
        return None if cast_losses.is_safe(stored, wanted) else f"{show_path(self.handle.path)}: {stored} to {wanted}"

    def _boxes(self) -> list[tuple[slice, ...]]:
        """The distinct shards, if there are several and jax can hold them."""
        shape, sharding = self.handle.shape, self._form.sharding
        if (
            sharding is None
            or sharding.is_fully_replicated
            or 0 in shape
            or not is_held(self._form.dtype(self.handle.dtype))
        ):
            return []
        indices = sharding.addressable_devices_indices_map(shape).values()
        boxes = {_key(box): box for box in (normalize_index(index, shape) for index in indices)}
        return list(boxes.values())

    def _is_elsewhere(self) -> bool:
        """Whether it is an array that only devices of other processes shall hold."""
        handle, sharding = self.handle, self._form.sharding
        if handle.kind is not LeafKind.ARRAY or state_dict.is_prng_key(self._form.target):
            return False
        return sharding is not None and not sharding.addressable_devices and is_held(self.dtype)

    def _sharded(self, values: list[Any]) -> jax.Array:
        """An array of its shards; each value goes to all devices that hold its box."""
        shape = self.handle.shape
        shards: dict[Any, np.ndarray[Any, Any]] = {
            _key(part.index): self._form.cast(value)
            for part, value in zip(self.asked, values, strict=True)
            if isinstance(part, ArraySlice)
        }

        def shard(index: Any) -> np.ndarray[Any, Any]:
            return shards[_key(normalize_index(index, shape))]

        sharding: Any = self._form.sharding
        with transfers_allowed():
            return jax.make_array_from_callback(shape, sharding, shard)


def _key(box: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((side.start, side.stop) for side in box)  # slices have no hash


def transfers_allowed() -> Any:
    """Within it jax may put arrays on devices: whoever forbids what happens unasked has asked for a restore."""
    return jax.transfer_guard_host_to_device("allow")


def all_transfers_allowed() -> Any:
    """The same for what also moves from device to device; takes longer."""
    return jax.transfer_guard("allow")


def on_devices(value: np.ndarray[Any, Any], sharding: Any) -> Any:
    """The array where the sharding says; the CPU backend may take over its memory."""
    # For one device, too: half the time of jax.device_put.
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def is_held(dtype: Any) -> bool:
    """Return whether jax has arrays of this dtype, and keeps it (64 bits without x64: not)."""
    return _can_be_held(np.dtype(dtype), jax.dtypes.canonicalize_dtype(np.float64))


@functools.cache
def _can_be_held(dtype: np.dtype[Any], widest: Any) -> bool:  # noqa: ARG001  (x64 can be switched on and off)
    """False where jax has no such dtype, or would narrow it in silence (64 bits without x64): it stays as saved."""
    try:
        kept = jax.eval_shape(lambda x: x, np.zeros((), dtype)).dtype
    except TypeError:
        return False
    return bool(kept == dtype)


def as_state(node: Node, *, lists: bool = False) -> Any:
    """Nested dicts with text keys, as Flax restores without a target: lists are maps of '0', '1', …

    Args:
        lists: lists stay lists. Flax writes no msgpack array, and gives one that others wrote as a list.
    """
    if not isinstance(node, Branch):
        return node
    children = {name: as_state(child, lists=lists) for name, child in node.children.items()}
    return list(children.values()) if lists and node.container is Container.LIST else children


def as_stored(node: Node) -> Any:
    """Lists, tuples and int keys where the format recorded them (setting ``structure="stored"``)."""
    if not isinstance(node, Branch):
        return node
    children = {name: as_stored(child) for name, child in node.children.items()}
    if node.container is Container.LIST:
        return list(children.values())
    if node.container is Container.TUPLE:
        return tuple(children.values())
    return {int(name) if name in node.int_keys else name: child for name, child in children.items()}
