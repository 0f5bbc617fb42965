"""What a match decided → the values, with one call of the reader for all that has to be read."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat import placing, state
from flax_ckpt_compat._core.backend import Format, LeafHandle, LeafKind, Part
from flax_ckpt_compat._core.tree import Branch, Path, is_jax_array, iter_leaves, map_leaves, show_path
from flax_ckpt_compat.leaves import Computed, Kept, Stored
from flax_ckpt_compat.matching import ShapeDifference
from flax_ckpt_compat.similar import shorten

_log = logging.getLogger("flax_ckpt_compat")


def execute(sources: Any, reader: Any, *, cast: bool, lists: bool) -> tuple[Any, list[ShapeDifference]]:
    """The values of a tree of sources.

    Args:
        sources: nested dicts, or branches, of `Stored` and `Kept`.
        reader: of the checkpoint that the leaf handles are of.
        cast: cast arrays to their target's dtype.
        lists: stored lists that the target asks for as they are stay lists.

    Returns:
        Dicts, or branches, like those of the sources; and the shapes that differ from the target's and that only
        the functions that computed them knew.
    """
    run = _Run(reader, cast)
    jobs = [
        (path, leaf, run.plan(leaf, source))
        for path, source in _stored(sources, ())
        for _, leaf in iter_leaves(source.node)
        if isinstance(leaf, LeafHandle | Computed)
    ]
    run.read()
    done = (run.value(*job) for job in jobs)
    values = _fill(sources, lambda leaf: next(done) if isinstance(leaf, LeafHandle | Computed) else leaf, lists)
    run.tell_narrowed()
    return values, run.shapes


def _stored(sources: Any, path: Path) -> Iterator[tuple[Path, Stored]]:
    if isinstance(sources, Stored):
        yield path, sources
    children = sources.children if isinstance(sources, Branch) else sources
    if isinstance(children, dict):
        for name, child in children.items():
            yield from _stored(child, (*path, name))


def _fill(sources: Any, value_of: Callable[[Any], Any], lists: bool) -> Any:
    """Sources → their values, asked for in the order of `_stored`."""
    if isinstance(sources, dict):
        return {name: _fill(child, value_of, lists) for name, child in sources.items()}
    if isinstance(sources, Branch):
        return map_leaves(lambda _, source: _fill(source, value_of, lists), sources)
    if isinstance(sources, Kept):
        return sources.value
    return placing.as_state(map_leaves(lambda _, leaf: value_of(leaf), sources.node), lists=lists)


class _Run:
    """Reads once what all leaves need, then gives their values in the order in which they were planned.

    Attributes:
        shapes: where a function gave another shape than the target's.
    """

    def __init__(self, reader: Any, cast: bool):
        self._reader, self._cast = reader, cast
        self.shapes: list[ShapeDifference] = []
        self._asked: list[LeafHandle | Part] = []
        self._values: list[Any] = []
        # Inputs of computations, by id: several may need one, and each is read, or computed, once.
        self._uses: Counter[int] = Counter()
        self._wishes: dict[int, placing.Wish] = {}
        self._ready: dict[int, Any] = {}
        self._given: dict[int, Any] = {}
        self._narrowed: list[str] = []

    def plan(self, leaf: LeafHandle | Computed, source: Stored) -> placing.Wish | placing.Form | None:
        """Notes what has to be read for a leaf of a source.

        Returns:
            What `value` takes; None for what is in its final form as soon as it is read.
        """
        if isinstance(leaf, LeafHandle):
            if not self._is_final(leaf, source):
                return self._wish(leaf, source)
            self._asked.append(leaf)
            return None
        self._plan_inputs(leaf)
        on_device = self._reader.format is Format.ORBAX or any(handle.distributed for handle in leaf.handles)
        return placing.Form(source.target, self._cast or source.cast, on_device)

    def _is_final(self, handle: LeafHandle, source: Stored) -> bool:
        """True for arrays that are neither cast nor placed; most leaves of a msgpack file are, so this is quick."""
        if handle.kind is not LeafKind.ARRAY or handle.may_be or self._cast or source.cast:
            return False
        if isinstance(source.target, jax.ShapeDtypeStruct):
            return False
        on_device = self._reader.format is Format.ORBAX or handle.distributed
        return not isinstance(source.target, jax.Array) or not (on_device or placing.spans_processes(source.target))

    def _wish(self, handle: LeafHandle, source: Stored) -> placing.Wish:
        on_device = self._reader.format is Format.ORBAX or handle.distributed
        wish = placing.Wish(handle, placing.Form(source.target, self._cast or source.cast, on_device))
        self._asked.extend(wish.asked)
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
        if self._asked:
            once = {id(one): one for one in self._asked}
            values = self._reader.read(list(once.values()))
            self._values = (
                values if len(once) == len(self._asked) else self._for_each(dict(zip(once, values, strict=True)))
            )
            self._values.reverse()

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
                shorten(self._narrowed),
            )

    def value(self, path: Path, leaf: LeafHandle | Computed, how: placing.Wish | placing.Form | None) -> Any:
        """The value of a leaf that was planned, in its final form.

        Args:
            path: where it goes in the target.
            leaf: the leaf.
            how: what `plan` gave.
        """
        if how is None:
            return self._values.pop()
        if isinstance(how, placing.Wish):
            # Popped, so that nothing but the result holds the bytes any longer.
            return how.grant([self._values.pop() for _ in how.asked])
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
            names = ", ".join(show_path(handle.path) for handle in leaf.handles)
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
            return wish.grant([self._values.pop() for _ in wish.asked])
        return self._values.pop()


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
