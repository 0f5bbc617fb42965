"""The values of the leaves that a restore wants, with one call of the reader for all that has to be read."""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat import _casting, placing, state
from flax_ckpt_compat._core.backend import Format, LeafHandle, LeafKind, Part
from flax_ckpt_compat._core.folding import Row, one_line
from flax_ckpt_compat._core.tree import Path, is_jax_array, show_path
from flax_ckpt_compat.leaves import Computed, Stored
from flax_ckpt_compat.matching import ShapeDifference

_log = logging.getLogger("flax_ckpt_compat")

# What `Run.value` takes, or the sharding where nothing but placing is left to do, or None where nothing is.
How = placing.Wish | placing.Form | jax.sharding.Sharding | None


class Run:
    """Reads once what all leaves need, then gives their values in the order in which they were planned.

    Attributes:
        shapes: where a function gave another shape than the target's.
        values: what was read and is not yet asked for, the next one last.
    """

    def __init__(self, reader: Any, cast: bool, mapped: bool):
        self._reader, self._cast = reader, cast
        # What may lie over the mapped file, by id; None where nothing may.
        self._mapped: set[int] | None = set() if mapped else None
        self._on_device = reader.format is Format.ORBAX
        # Arrays to cast, by id.
        self._casts: dict[int, np.dtype[Any]] = {}
        self._targets = placing.Targets()
        self.shapes: list[ShapeDifference] = []
        self._asked: list[LeafHandle | Part] = []
        self.values: list[Any] = []
        # Inputs of computations, by id: several may need one, and each is read, or computed, once.
        self._uses: Counter[int] = Counter()
        self._wishes: dict[int, placing.Wish] = {}
        self._ready: dict[int, Any] = {}
        self._given: dict[int, Any] = {}
        self._narrowed: list[str] = []

    def plan(self, leaf: LeafHandle | Computed, source: Stored) -> How:
        """Notes what has to be read for a leaf of a source.

        Returns:
            What `value` takes; a sharding, or None, for what only has to be placed, or is in its final form.
        """
        if isinstance(leaf, LeafHandle):
            # Most leaves are arrays that are not cast, so this is quick.
            if leaf.kind is LeafKind.ARRAY and not (self._cast or source.cast or leaf.may_be):
                how: How = self._targets.simple(source.target, leaf.dtype, self._on_device or leaf.distributed)
                if how is not placing.NOT_SIMPLE:
                    self._asked.append(leaf)
                    if self._mapped is not None:
                        self._may_be_mapped(leaf, how is None)
                    return how
            wish = self._wish(leaf, source)
            self._may_be_mapped(leaf, not wish.is_placed)
            return wish
        self._plan_inputs(leaf)
        on_device = self._on_device or any(handle.distributed for handle in leaf.handles)
        return placing.Form(source.target, self._cast or source.cast, on_device)

    def _may_be_mapped(self, leaf: LeafHandle, stays: bool) -> None:
        if stays and self._mapped is not None:
            self._mapped.add(id(leaf))

    def _wish(self, handle: LeafHandle, source: Stored) -> placing.Wish:
        on_device = self._on_device or handle.distributed
        wish = placing.Wish(handle, placing.Form(source.target, self._cast or source.cast, on_device))
        self._asked.extend(wish.asked)
        cast = _casting.cast_of(handle, wish.dtype)
        if cast is not None:
            self._casts.update((id(one), cast) for one in wish.asked)
        if not self._cast and not source.cast and wish.narrowed is not None:
            self._narrowed.append(wish.narrowed)
        return wish

    def _plan_inputs(self, computed: Computed) -> None:
        for one in computed.inputs:
            self._uses[id(one)] += 1
            if self._uses[id(one)] > 1:
                continue
            if isinstance(one, Computed):
                self._plan_inputs(one)
            elif isinstance(one, Stored):
                self._wishes[id(one)] = self._wish(one.node, one)
            else:
                self._asked.append(one)

    def read(self) -> None:
        """Reads all that was planned."""
        asked = self._asked
        if asked and len(set(map(id, asked))) == len(asked):
            self.values = self._read(asked, self._casts)
        elif asked:
            once = {id(one): one for one in asked}
            # What several ask for is cast by each of them.
            self.values = self._for_each(dict(zip(once, self._read(list(once.values()), {}), strict=True)))
        self.values.reverse()

    def _read(self, asked: list[LeafHandle | Part], casts: dict[int, np.dtype[Any]]) -> list[Any]:
        if not self._mapped:
            return _casting.read(self._reader.read, asked, casts)
        mapped = [one for one in asked if id(one) in self._mapped]
        others = [one for one in asked if id(one) not in self._mapped]
        read_mapped = functools.partial(self._reader.read, mapped=True)
        values = dict(zip(map(id, mapped), _casting.read(read_mapped, mapped, casts), strict=True))
        values.update(zip(map(id, others), _casting.read(self._reader.read, others, casts), strict=True))
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

    def tell_narrowed(self) -> None:
        """Says which casts may have lost values."""
        if self._narrowed:
            _log.warning(
                "%s: cast to what the abstract target says, which cannot hold every value that was saved: %s",
                self._reader.path,
                one_line(Row((leaf,), (what,)) for leaf, _, what in (text.rpartition(": ") for text in self._narrowed)),
            )

    def value(self, path: Path, leaf: LeafHandle | Computed, how: placing.Wish | placing.Form) -> Any:
        """The value of a leaf that was planned, in its final form.

        Args:
            path: where it goes in the target.
            leaf: the leaf.
            how: what `plan` gave.
        """
        if isinstance(how, placing.Wish):
            return how.grant([self.values.pop() for _ in how.asked])
        assert isinstance(leaf, Computed)  # it has no wish
        value = self._compute(leaf)
        if isinstance(value, np.generic) and hasattr(how.target, "shape"):
            value = np.array(value)
        if not isinstance(value, np.ndarray) and (not is_jax_array(value) or state.is_prng_key(value)):
            return value
        self._compare(path, leaf, value, how.target)
        try:
            return _placed(value, how)
        except ValueError as error:
            names = one_line(show_path(handle.path) for handle in leaf.handles)
            raise placing.misfit(
                f"{show_path(path)} ({leaf.how} of {names})", tuple(value.shape), how, self._reader.path
            ) from error

    def _compare(self, path: Path, leaf: Computed, value: Any, target: Any) -> None:
        """Notes a shape that only the function knew, and a cast that nobody but an abstract target asks for."""
        wanted = getattr(target, "shape", None)
        if leaf.shape is None and wanted is not None and tuple(value.shape) != tuple(wanted):
            self.shapes.append((path, tuple(value.shape), tuple(wanted)))
        is_told = isinstance(target, jax.ShapeDtypeStruct) and not state.is_prng_key(target) and not self._cast
        if is_told and not np.can_cast(value.dtype, target.dtype, "safe"):
            self._narrowed.append(f"{show_path(path)}: {value.dtype} to {target.dtype}")

    def _compute(self, computed: Computed) -> Any:
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
        if isinstance(one, Computed):
            return self._compute(one)
        if isinstance(one, Stored):
            wish = self._wishes.pop(id(one))
            return wish.grant([self.values.pop() for _ in wish.asked])
        return self.values.pop()


def _is_of(result: np.ndarray[Any, Any], values: list[Any]) -> bool:
    return any(isinstance(value, np.ndarray) and np.may_share_memory(result, value) for value in values)


def _placed(value: Any, form: placing.Form) -> Any:
    """An array that was computed, cast and placed; those of jax stay where they are unless the target says where."""
    if isinstance(value, np.ndarray):
        return form.place(value)
    dtype, sharding = form.dtype(value.dtype), form.sharding
    value = value if value.dtype == dtype else value.astype(dtype)
    is_there = sharding is None or value.sharding.is_equivalent_to(sharding, value.ndim)
    return value if is_there else jax.device_put(value, sharding)
