"""Plan the reads, the placement and the cast of single leaves. Reads no array data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CheckpointError, DtypeMismatchError
from flax_ckpt_compat._core.text_formatting import one_line
from flax_ckpt_compat._core.tree import Path, show_path
from flax_ckpt_compat._restore import casting, leaf_kinds, placement
from flax_ckpt_compat._restore.plan import LeafPlan, TreePlan
from flax_ckpt_compat._trees import prng_keys
from flax_ckpt_compat._trees.leaf_sources import Derived, FunctionInput, shape_and_dtype

_SMALL_BYTES = 4096


class LeafPlanner:
    """Planner of single leaves; adds what is impossible, or may lose values, to the tree's plan."""

    def __init__(self, plan: TreePlan):
        self._plan = plan
        self._casts = plan.options.casts
        self._on_device = plan.reader.places_on_device
        # True for jax's arrays, False for types without a sharding, None for abstract arrays.
        self._types: Callable[[type], bool | None] = functools.cache(_is_array_type)
        self._traits_of = functools.cache(placement.traits_of)
        self._has_devices = functools.cache(placement.has_devices)
        self._held = functools.cache(placement.is_held)
        self._fits = functools.cache(placement.fits)
        self._device_count = 0
        # Types of the target's leaves whose arrays stay in host memory as they are read, except those of ``_gda``
        # folders and of several possible kinds.
        self.host_types: set[type] = set()

    def array(self, path: Path, handle: LeafHandle, target: Any) -> LeafPlan:
        """Plan a stored array for a target's leaf, or for None; quick for those that are not cast."""
        if type(target) in self.host_types and not (handle.possible_kinds or handle.in_gda_folder):
            return LeafPlan(path, handle, target, True)
        if self._casts or handle.possible_kinds:
            return self.stored(path, handle, target)
        is_array = self._types(type(target))
        on_device = is_array is None or self._on_device or handle.in_gda_folder
        if is_array is False or (not on_device and self._is_one_device()):
            self.host_types.add(type(target))
            return LeafPlan(path, handle, target, True)
        if not is_array and not self._is_as_stored(handle, target):
            return self.stored(path, handle, target)
        # Most are equal to the one before, and few are the same: one object for equal ones is found faster.
        sharding, is_single, is_local, least = self._traits_of(target.sharding)
        if is_single and not on_device:
            return LeafPlan(path, handle, target, True)
        dtype, kept = handle.dtype, target.dtype
        is_held = self._held(dtype) and (kept is dtype or isinstance(kept, np.dtype))
        if is_held and is_single and len(handle.shape) >= least:
            return LeafPlan(path, handle, target, True, sharding)
        if is_held and not is_single and self._fits(sharding, handle.shape):
            # One small chunk is read whole in less time than its slices.
            is_small = is_local and handle.nbytes < _SMALL_BYTES
            is_whole = is_small and handle.reader.chunks_of(handle)[0] == handle.shape
            slices = None if is_whole else placement.slices(handle, sharding)
            return LeafPlan(path, handle, target, slices is None, sharding, None, slices)
        return self.stored(path, handle, target)

    def _is_as_stored(self, handle: LeafHandle, target: Any) -> bool:
        """Return whether an abstract array has the stored dtype, and a sharding over devices."""
        if type(target) is not jax.ShapeDtypeStruct or not self._has_devices(target.sharding):
            return False
        return isinstance(target.dtype, np.dtype) and target.dtype == handle.dtype

    def _is_one_device(self) -> bool:
        # Lazy: device_count starts jax's backends.
        self._device_count = self._device_count or jax.device_count()
        return self._device_count == 1

    def stored(self, path: Path, handle: LeafHandle, target: Any) -> LeafPlan:
        """Plan a stored leaf of any kind."""
        if handle.kind is LeafKind.UNSUPPORTED:
            try:
                handle.read()  # a checkpointer of the caller's may have it
            except CheckpointError as refusal:
                self._plan.problems.append(refusal)
        if handle.possible_kinds and leaf_kinds.is_ambiguous(handle, target):
            self._plan.problems.append(leaf_kinds.ambiguous_key(handle))
        kind, dtype = leaf_kinds.resolved_kind(handle, target), leaf_kinds.stored_dtype(handle)
        on_device = self._on_device or handle.in_gda_folder
        leaf = LeafPlan(path, handle, target)
        name = show_path(handle.path)
        if kind is LeafKind.PRNG_KEY:
            if prng_keys.is_prng_key(target):
                # Keys have no copy in host memory, so the sharding applies in every format.
                leaf.sharding = placement.sharding_of(target)
                self._check(leaf, name, handle.shape[:-1], None, on_device)
            return leaf
        if kind is LeafKind.ARRAY:
            wanted = self._wanted_dtype(target)
            leaf.cast = None if wanted == dtype else wanted
        else:
            leaf.cast = leaf_kinds.cast_of_number(kind, dtype, target, self._casts)
            if leaf.cast is None:
                return leaf
        leaf.sharding = placement.wanted_sharding(target, on_device)
        self._check(leaf, name, handle.shape, dtype, on_device)
        if kind is not LeafKind.ARRAY or prng_keys.is_prng_key(target):
            return leaf
        if leaf.sharding is not None and placement.is_held(dtype if leaf.cast is None else leaf.cast):
            leaf.slices = placement.slices(handle, leaf.sharding)
        return leaf

    def derived(self, path: Path, source: Derived, target: Any) -> LeafPlan:
        """Plan a derived leaf, and the inputs of users' functions."""
        self._plan_inputs(source)
        on_device = self._on_device or any(handle.in_gda_folder for handle in source.handles)
        leaf = LeafPlan(path, source, target)
        leaf.sharding, leaf.cast = placement.wanted_sharding(target, on_device), self._wanted_dtype(target)
        if source.shape is not None:
            self._check(leaf, describe_derived(path, source), source.shape, source.dtype, on_device)
        return leaf

    def _plan_inputs(self, source: Derived) -> None:
        for one in source.inputs:
            if isinstance(one, Derived):
                self._plan_inputs(one)
            elif isinstance(one, FunctionInput) and one not in self._plan.inputs:
                self._plan.inputs[one] = self.stored((), one.handle, one.target)

    def _wanted_dtype(self, target: Any) -> Any:
        """Return the dtype that arrays are cast to for a target's leaf, or None to keep the stored one."""
        is_wanted = self._casts or isinstance(target, jax.ShapeDtypeStruct)
        return shape_and_dtype(target)[1] if is_wanted and not prng_keys.is_prng_key(target) else None

    def _check(self, leaf: LeafPlan, name: str, shape: tuple[int, ...], dtype: Any, on_device: bool) -> None:
        """Record an impossible cast or sharding; take away a sharding that does not apply."""
        wanted = dtype if leaf.cast is None else leaf.cast
        if dtype is not None and wanted != dtype and not casting.exists(dtype, wanted):
            self._plan.problems.append(no_cast(name, dtype, wanted, self._plan.path))
        if leaf.sharding is None:
            return
        if not self._fits(leaf.sharding, shape):
            if on_device or isinstance(leaf.target, jax.ShapeDtypeStruct):
                self._plan.problems.append(placement.misfit(name, shape, leaf.sharding, self._plan.path))
            # A msgpack array for a target of another shape: it stays on the host, as in Flax and as the warning about
            # its shape says.
            leaf.sharding = None
        elif wanted is not None and len(leaf.sharding.device_set) > 1 and not placement.is_held(wanted):
            self._plan.unsharded.append(f"{name} ({wanted})")


def _is_array_type(kind: type) -> bool | None:
    return None if issubclass(kind, jax.ShapeDtypeStruct | jax.core.Tracer) else issubclass(kind, jax.Array)


def no_cast(leaf: str, stored: Any, wanted: Any, path: str) -> DtypeMismatchError:
    """Return the error for a cast that does not exist."""
    return DtypeMismatchError(
        f"{path}: {leaf}: the stored {stored} cannot be cast to the target's {wanted}; give the target's leaf a dtype "
        "of numbers, or restore it as stored (dtype='stored') and convert it afterwards.",
        path=path,
        leaf=leaf,
    )


def describe_derived(path: Path, source: Derived) -> str:
    """Return a derived leaf's name for messages."""
    names = one_line(show_path(handle.path) for handle in source.handles)
    return f"{show_path(path)} ({source.how} of {names})"
