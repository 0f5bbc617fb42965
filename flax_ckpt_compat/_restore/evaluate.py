"""The values of the leaves that a restore wants, with one call of the reader for all that has to be read."""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core.backend import ArraySlice, Format, LeafHandle, LeafKind
from flax_ckpt_compat._core.folding import Row, one_line
from flax_ckpt_compat._core.memo import Memo
from flax_ckpt_compat._core.tree import Path, is_jax_array, show_path
from flax_ckpt_compat._restore import cast_losses, casting, placement, scalar_kinds, target_shardings
from flax_ckpt_compat._restore.matching import ShapeDifference
from flax_ckpt_compat._restore.problems import Problems, no_cast
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, FromCheckpoint

_log = logging.getLogger("flax_ckpt_compat")

# What `LeafReader.value` takes, or the sharding where nothing but placing is left to do, or None where nothing is.
How = placement.LeafPlacement | placement.TargetLeafSpec | jax.sharding.Sharding | None


class LeafReader:
    """Reads once what all leaves need, then gives their values in the order in which they were planned.

    Attributes:
        problems: what makes it impossible.
        shapes: where a function gave another shape than the target's.
        values: what was read and is not yet asked for, the next one last.
    """

    def __init__(self, reader: Any, cast: bool, mapped: bool):
        self._reader, self._cast = reader, cast
        # What may lie over the mapped file, by id; None where nothing may.
        self._mapped: set[int] | None = set() if mapped else None
        self._on_device = reader.format is Format.ORBAX
        # Arrays to cast, by id.
        self._casts: dict[int, tuple[LeafHandle, casting.Cast]] = {}
        self._targets = placement.Targets()
        self._fits = Memo(lambda pair: target_shardings.fits(*pair))
        self.problems = Problems()
        self.shapes: list[ShapeDifference] = []
        self._asked: list[LeafHandle | ArraySlice] = []
        self.values: list[Any] = []
        # Inputs of computations, by id: several may need one, and each is read, or computed, once.
        self._uses: Counter[int] = Counter()
        self._wishes: dict[int, placement.LeafPlacement] = {}
        self._ready: dict[int, Any] = {}
        self._given: dict[int, Any] = {}
        self._narrowed: list[str] = []
        # Leaves whose values a cast lost, and those too wide for a sharding of jax; in order, each once.
        self._lost: dict[str, None] = {}
        self._unplaced: dict[str, None] = {}

    def plan(self, leaf: LeafHandle | Derived, source: FromCheckpoint, path: Path = ()) -> How:
        """Notes what has to be read for a leaf of a source.

        Args:
            leaf: the leaf.
            source: what it is a leaf of.
            path: where a computed leaf goes in the target, for messages.

        Returns:
            What `value` takes; a sharding, or None, for what only has to be placed, or is in its final form.
        """
        if isinstance(leaf, LeafHandle):
            # Most leaves are arrays that are not cast, so this is quick.
            if leaf.kind is LeafKind.ARRAY and not (self._cast or source.cast or leaf.possible_kinds):
                on_device = self._on_device or leaf.in_gda_folder
                how: How = self._targets.simple(source.target, leaf.dtype, len(leaf.shape), on_device)
                if how is not placement.NOT_SIMPLE:
                    self._asked.append(leaf)
                    if self._mapped is not None:
                        self._may_be_mapped(leaf, how is None)
                    return how
            wish = self._wish(leaf, source)
            self._may_be_mapped(leaf, not wish.is_placed)
            return wish
        self._plan_inputs(leaf)
        on_device = self._on_device or any(handle.in_gda_folder for handle in leaf.handles)
        form = placement.TargetLeafSpec(source.target, self._cast or source.cast, on_device)
        if leaf.shape is not None:
            self._check(_told(path, leaf), leaf.shape, leaf.dtype, form, on_device)
        return form

    def _check(
        self, name: str, shape: tuple[int, ...], dtype: Any, form: placement.TargetLeafSpec, on_device: bool
    ) -> None:
        """Notes casts and shardings that are impossible, before anything is read."""
        wanted = dtype if dtype is None else form.dtype(dtype)
        if wanted != dtype and not casting.exists(dtype, wanted):
            self.problems.casts.append((name, dtype, wanted))
        if form.sharding is None:
            return
        if not self._fits[form.sharding, shape]:
            if on_device or isinstance(form.target, jax.ShapeDtypeStruct):
                self.problems.misfits.append((name, shape, form.sharding))
            # An array of Flax's own format for a target of another shape: as in Flax it stays on the host, as the
            # warning of its shape says.
            form.sharding = None
        elif wanted is not None and len(form.sharding.device_set) > 1 and not placement.is_held(wanted):
            self._unplaced[f"{name} ({wanted})"] = None

    def _may_be_mapped(self, leaf: LeafHandle, stays: bool) -> None:
        if stays and self._mapped is not None:
            self._mapped.add(id(leaf))

    def _wish(self, handle: LeafHandle, source: FromCheckpoint) -> placement.LeafPlacement:
        on_device = self._on_device or handle.in_gda_folder
        form = placement.TargetLeafSpec(source.target, self._cast or source.cast, on_device)
        self._check_stored(handle, form, on_device)
        wish = placement.LeafPlacement(handle, form)
        self._asked.extend(wish.asked)
        dtype = casting.cast_of(handle, wish.dtype)
        if dtype is not None:
            cast = casting.Cast(dtype, form.is_checked)
            self._casts.update((id(one), (handle, cast)) for one in wish.asked)
        if not self._cast and not source.cast and wish.narrowed is not None:
            self._narrowed.append(wish.narrowed)
        return wish

    def _check_stored(self, handle: LeafHandle, form: placement.TargetLeafSpec, on_device: bool) -> None:
        name, is_key = show_path(handle.path), handle.kind is LeafKind.PRNG_KEY
        if handle.possible_kinds and scalar_kinds.is_doubtful(handle, form.target):
            self.problems.doubtful.append(handle)
        elif is_key and state_dict.is_prng_key(form.target):
            # Of a key there is no copy in host memory, so its place counts whatever the format.
            form.sharding = target_shardings.of(form.target)
            self._check(name, handle.shape[:-1], None, form, on_device)
        elif is_key or not (
            handle.kind is LeafKind.ARRAY or scalar_kinds.is_converted(handle, form.target, form.is_checked)
        ):
            form.sharding = None
        elif scalar_kinds.wants_array(form.target):
            self._check(name, handle.shape, scalar_kinds.stored_dtype(handle), form, on_device)

    def _plan_inputs(self, computed: Derived) -> None:
        for one in computed.inputs:
            self._uses[id(one)] += 1
            if self._uses[id(one)] > 1:
                continue
            if isinstance(one, Derived):
                self._plan_inputs(one)
            elif isinstance(one, FromCheckpoint):
                self._wishes[id(one)] = self._wish(one.node, one)
            else:
                self._asked.append(one)

    def read(self) -> None:
        """Reads all that was planned."""
        asked = self._asked
        if asked and len(set(map(id, asked))) == len(asked):
            self.values = self._read(asked, {one: cast for one, (_, cast) in self._casts.items()})
            self._lost.update((show_path(handle.path), None) for handle, cast in self._casts.values() if cast.is_lossy)
        elif asked:
            once = {id(one): one for one in asked}
            # What several ask for is cast by each of them.
            self.values = self._for_each(dict(zip(once, self._read(list(once.values()), {}), strict=True)))
        self.values.reverse()

    def _read(self, asked: list[LeafHandle | ArraySlice], casts: dict[int, casting.Cast]) -> list[Any]:
        if not self._mapped:
            return casting.read(self._reader.read, asked, casts)
        mapped = [one for one in asked if id(one) in self._mapped]
        others = [one for one in asked if id(one) not in self._mapped]
        read_mapped = functools.partial(self._reader.read, mapped=True)
        values = dict(zip(map(id, mapped), casting.read(read_mapped, mapped, casts), strict=True))
        values.update(zip(map(id, others), casting.read(self._reader.read, others, casts), strict=True))
        return [values[id(one)] for one in asked]

    def _for_each(self, values: dict[int, Any]) -> list[Any]:
        """The values, with a copy for everyone but the first who asked for the same."""
        given: set[int] = set()
        found = []
        for one in self._asked:
            value = values[id(one)]
            found.append(copy.deepcopy(value) if id(one) in given else value)
            given.add(id(one))
        return found

    def tell(self) -> None:
        """Says which casts lost values, or may have, and what did not become an array of jax."""
        if self._lost:
            _log.warning(
                "%s: cast to the target's dtype, which does not hold all values: %s",
                self._reader.path,
                one_line(self._lost),
            )
        if self._unplaced:
            _log.warning(
                "%s: 64 bits without jax's x64, or no dtype of jax: whole arrays stay in host memory, not sharded as "
                "the target says; set jax_enable_x64, or cast: %s",
                self._reader.path,
                one_line(self._unplaced),
            )
        if self._narrowed:
            _log.warning(
                "%s: cast to what the abstract target says, which cannot hold every value that was saved: %s",
                self._reader.path,
                one_line(Row((leaf,), (what,)) for leaf, _, what in (text.rpartition(": ") for text in self._narrowed)),
            )

    def value(
        self, path: Path, leaf: LeafHandle | Derived, how: placement.LeafPlacement | placement.TargetLeafSpec
    ) -> Any:
        """The value of a leaf that was planned, in its final form.

        Args:
            path: where it goes in the target.
            leaf: the leaf.
            how: what `plan` gave.
        """
        if isinstance(how, placement.LeafPlacement):
            return self._grant(how)
        assert isinstance(leaf, Derived)  # it has no wish
        value = self._compute(leaf)
        if isinstance(value, np.generic) and hasattr(how.target, "shape"):
            value = np.array(value)
        if not isinstance(value, np.ndarray) and (not is_jax_array(value) or state_dict.is_prng_key(value)):
            return value
        self._compare(path, leaf, value, how.target)
        if leaf.shape is None:
            self._check_value(_told(path, leaf), value, how)
        result = _placed(value, how)
        if how.is_lossy:
            self._lost[_told(path, leaf)] = None
        return result

    def _check_value(self, name: str, value: Any, form: placement.TargetLeafSpec) -> None:
        """Raises for a result, of which only the function knew shape and dtype, that cannot be cast or placed."""
        dtype = form.dtype(value.dtype)
        if dtype != value.dtype and not casting.exists(value.dtype, dtype):
            raise no_cast(name, value.dtype, dtype, self._reader.path)
        if form.sharding is not None and not self._fits[form.sharding, tuple(value.shape)]:
            raise target_shardings.misfit(name, tuple(value.shape), form.sharding, self._reader.path)

    def _grant(self, wish: placement.LeafPlacement) -> Any:
        value = wish.finalize([self.values.pop() for _ in wish.asked])
        if wish.is_lossy:
            self._lost[show_path(wish.handle.path)] = None
        return value

    def _compare(self, path: Path, leaf: Derived, value: Any, target: Any) -> None:
        """Notes a shape that only the function knew, and a cast that nobody but an abstract target asks for."""
        wanted = getattr(target, "shape", None)
        if leaf.shape is None and wanted is not None and tuple(value.shape) != tuple(wanted):
            self.shapes.append((path, tuple(value.shape), tuple(wanted)))
        is_told = isinstance(target, jax.ShapeDtypeStruct) and not state_dict.is_prng_key(target) and not self._cast
        if is_told and not cast_losses.is_safe(value.dtype, target.dtype):
            self._narrowed.append(f"{show_path(path)}: {value.dtype} to {target.dtype}")

    def _compute(self, computed: Derived) -> Any:
        """The value of a computed leaf; an array is writable and shares no memory with any other leaf."""
        inputs, shared = [], []
        for one in computed.inputs:
            value = self._ready[id(one)] if id(one) in self._ready else self._input(one)
            inputs.append(value)
            self._uses[id(one)] -= 1
            if self._uses[id(one)]:
                self._ready[id(one)] = value
                shared.append(value)
            elif self._ready.pop(id(one), None) is not None:
                shared.append(value)  # others have taken from it before
        result = computed.function(*inputs)
        if not isinstance(result, np.ndarray):
            return result
        if not result.flags.carray or _is_of(result, shared) or id(result) in self._given:
            result = np.array(result, order="C")
        if computed.shape is None:
            # A caller's function may well give one array for several leaves; kept, so that no other gets its id.
            self._given[id(result)] = result
        return result

    def _input(self, one: Any) -> Any:
        if isinstance(one, Derived):
            return self._compute(one)
        if isinstance(one, FromCheckpoint):
            return self._grant(self._wishes.pop(id(one)))
        return self.values.pop()


def _is_of(result: np.ndarray[Any, Any], values: list[Any]) -> bool:
    return any(isinstance(value, np.ndarray) and np.may_share_memory(result, value) for value in values)


def _placed(value: Any, form: placement.TargetLeafSpec) -> Any:
    """An array that was computed, cast and placed; those of jax stay where they are unless the target says where."""
    if isinstance(value, np.ndarray):
        return form.place(value)
    dtype, sharding = form.dtype(value.dtype), form.sharding
    if value.dtype != dtype:
        form.is_lossy = (
            form.is_checked and value.is_fully_addressable and cast_losses.is_lossy(np.asarray(value), dtype)
        )
        value = value.astype(dtype)
    if sharding is None or value.sharding.is_equivalent_to(sharding, value.ndim):
        return value
    with placement.all_transfers_allowed():
        return jax.device_put(value, sharding)


def _told(path: Path, leaf: Derived) -> str:
    """How a computed leaf is called in messages."""
    names = one_line(show_path(handle.path) for handle in leaf.handles)
    return f"{show_path(path)} ({leaf.how} of {names})"
