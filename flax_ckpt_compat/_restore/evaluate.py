"""Evaluate the leaves of a restore: one read for all, then casts, placement and derived values."""

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
from flax_ckpt_compat._core.tree import KeyData, Path, is_jax_array, show_path
from flax_ckpt_compat._restore import cast_losses, casting, placement, scalar_kinds, target_shardings
from flax_ckpt_compat._restore.matching import ShapeDifference
from flax_ckpt_compat._restore.problems import Problems, no_cast
from flax_ckpt_compat._trees import state_dict
from flax_ckpt_compat._trees.leaf_sources import Derived, FromCheckpoint, shape_and_dtype

_log = logging.getLogger("flax_ckpt_compat")

# A leaf's way to its final form: an argument of `LeafReader.value`, a sharding to put it on, or None if it is final.
Placing = placement.LeafPlacement | placement.TargetLeafSpec | jax.sharding.Sharding | None


class LeafReader:
    """Reads the inputs of all leaves at once, then returns leaf values in the order in which they were planned.

    Attributes:
        problems: reasons why the restore is impossible.
        shapes: shapes of function results that are not the target's.
        values: values read and not yet used, the next one last.
    """

    def __init__(self, reader: Any, cast: bool, mapped: bool):
        self._reader, self._cast = reader, cast
        # Leaves that may be memory-mapped; None if the setting is off.
        self._mapped: set[LeafHandle | ArraySlice] | None = set() if mapped else None
        self._on_device = reader.format is Format.ORBAX
        self._casts: dict[LeafHandle | ArraySlice, tuple[LeafHandle, casting.Cast]] = {}
        self._targets = placement.Targets()
        self._sharding_fits = Memo(lambda pair: target_shardings.fits(*pair))
        self.problems = Problems()
        self.shapes: list[ShapeDifference] = []
        self._reads: list[LeafHandle | ArraySlice] = []
        self.values: list[Any] = []
        # Inputs of derived leaves: several leaves may share one, and each is read or computed once.
        self._uses: Counter[Any] = Counter()
        self._placements: dict[FromCheckpoint, placement.LeafPlacement] = {}
        self._ready: dict[Any, Any] = {}
        self._results: dict[int, Any] = {}  # by id: arrays have no hash
        self._narrowed: list[str] = []
        # Leaves that lost values in a cast, and leaves too wide for jax; ordered sets.
        self._lost: dict[str, None] = {}
        self._unsharded: dict[str, None] = {}

    def plan(self, leaf: LeafHandle | Derived, source: FromCheckpoint, path: Path = ()) -> Placing:
        """Plan the reads of a leaf.

        Args:
            leaf: the leaf.
            source: its source in the match.
            path: key path of a derived leaf in the target, for messages.

        Returns:
            The argument of `value`; a sharding for a leaf that only has to be put there; None for one that is final.
        """
        if isinstance(leaf, LeafHandle):
            # Most leaves are arrays that are not cast, so this is quick.
            if leaf.kind is LeafKind.ARRAY and not (self._cast or source.cast or leaf.possible_kinds):
                on_device = self._on_device or leaf.in_gda_folder
                placing: Placing = self._targets.simple(source.target, leaf.dtype, len(leaf.shape), on_device)
                if placing is not placement.NOT_SIMPLE:
                    self._reads.append(leaf)
                    if self._mapped is not None:
                        self._note_mapped(leaf, placing is None)
                    return placing
            leaf_placement = self._plan_leaf(leaf, source)
            self._note_mapped(leaf, not leaf_placement.is_placed)
            return leaf_placement
        self._plan_inputs(leaf)
        on_device = self._on_device or any(handle.in_gda_folder for handle in leaf.handles)
        spec = placement.TargetLeafSpec(source.target, self._cast or source.cast, on_device)
        if leaf.shape is not None:
            self._check(_describe_derived(path, leaf), leaf.shape, leaf.dtype, spec, on_device)
        return spec

    def _check(
        self, name: str, shape: tuple[int, ...], dtype: Any, spec: placement.TargetLeafSpec, on_device: bool
    ) -> None:
        """Record impossible casts and shardings, before any read."""
        wanted = dtype if dtype is None else spec.dtype(dtype)
        if wanted != dtype and not casting.exists(dtype, wanted):
            self.problems.casts.append((name, dtype, wanted))
        if spec.sharding is None:
            return
        if not self._sharding_fits[spec.sharding, shape]:
            if on_device or isinstance(spec.target, jax.ShapeDtypeStruct):
                self.problems.misfits.append((name, shape, spec.sharding))
            # A msgpack array for a target of another shape: it stays on the host, as in Flax and as the warning about
            # its shape says.
            spec.sharding = None
        elif wanted is not None and len(spec.sharding.device_set) > 1 and not placement.is_held(wanted):
            self._unsharded[f"{name} ({wanted})"] = None

    def _note_mapped(self, leaf: LeafHandle, stays: bool) -> None:
        if stays and self._mapped is not None:
            self._mapped.add(leaf)

    def _plan_leaf(self, handle: LeafHandle, source: FromCheckpoint) -> placement.LeafPlacement:
        on_device = self._on_device or handle.in_gda_folder
        spec = placement.TargetLeafSpec(source.target, self._cast or source.cast, on_device)
        self._check_stored(handle, spec, on_device)
        leaf_placement = placement.LeafPlacement(handle, spec)
        self._reads.extend(leaf_placement.reads)
        dtype = casting.cast_of(handle, leaf_placement.dtype)
        if dtype is not None:
            cast = casting.Cast(dtype, spec.is_checked)
            self._casts.update((one, (handle, cast)) for one in leaf_placement.reads)
        if not self._cast and not source.cast and leaf_placement.narrowed is not None:
            self._narrowed.append(leaf_placement.narrowed)
        return leaf_placement

    def _check_stored(self, handle: LeafHandle, spec: placement.TargetLeafSpec, on_device: bool) -> None:
        name, is_key = show_path(handle.path), handle.kind is LeafKind.PRNG_KEY
        if handle.possible_kinds and scalar_kinds.is_ambiguous(handle, spec.target):
            self.problems.ambiguous.append(handle)
        elif is_key and state_dict.is_prng_key(spec.target):
            # Keys have no copy in host memory, so the sharding applies in both formats.
            spec.sharding = target_shardings.of(spec.target)
            self._check(name, handle.shape[:-1], None, spec, on_device)
        elif is_key or not (
            handle.kind is LeafKind.ARRAY or scalar_kinds.is_converted(handle, spec.target, spec.is_checked)
        ):
            spec.sharding = None
        elif scalar_kinds.wants_array(spec.target):
            self._check(name, handle.shape, scalar_kinds.stored_dtype(handle), spec, on_device)

    def _plan_inputs(self, derived: Derived) -> None:
        for one in derived.inputs:
            self._uses[one] += 1
            if self._uses[one] > 1:
                continue
            if isinstance(one, Derived):
                self._plan_inputs(one)
            elif isinstance(one, FromCheckpoint):
                self._placements[one] = self._plan_leaf(one.node, one)
            else:
                self._reads.append(one)

    def read(self) -> None:
        """Read all planned leaves."""
        reads = self._reads
        if reads and len(set(reads)) == len(reads):
            self.values = self._read(reads, {one: cast for one, (_, cast) in self._casts.items()})
            self._lost.update((show_path(handle.path), None) for handle, cast in self._casts.values() if cast.is_lossy)
        elif reads:
            once = list(dict.fromkeys(reads))
            # Shared leaves are cast by each of their users.
            self.values = self._for_each(dict(zip(once, self._read(once, {}), strict=True)))
        self.values.reverse()

    def _read(
        self, reads: list[LeafHandle | ArraySlice], casts: dict[LeafHandle | ArraySlice, casting.Cast]
    ) -> list[Any]:
        if not self._mapped:
            return casting.read(self._reader.read, reads, casts)
        mapped = [one for one in reads if one in self._mapped]
        others = [one for one in reads if one not in self._mapped]
        read_mapped = functools.partial(self._reader.read, mapped=True)
        values = dict(zip(mapped, casting.read(read_mapped, mapped, casts), strict=True))
        values.update(zip(others, casting.read(self._reader.read, others, casts), strict=True))
        return [values[one] for one in reads]

    def _for_each(self, values: dict[LeafHandle | ArraySlice, Any]) -> list[Any]:
        """Return a value for each planned read; repeated reads get copies."""
        seen: set[LeafHandle | ArraySlice] = set()
        found = []
        for one in self._reads:
            found.append(copy.deepcopy(values[one]) if one in seen else values[one])
            seen.add(one)
        return found

    def log_warnings(self) -> None:
        """Log which casts lost values or may have, and which arrays jax cannot hold."""
        if self._lost:
            _log.warning(
                "%s: cast to the target's dtype, which does not hold all values: %s",
                self._reader.path,
                one_line(self._lost),
            )
        if self._unsharded:
            _log.warning(
                "%s: 64 bits without jax's x64, or no dtype of jax: whole arrays stay in host memory, without the "
                "target's sharding; set jax_enable_x64, or cast: %s",
                self._reader.path,
                one_line(self._unsharded),
            )
        if self._narrowed:
            _log.warning(
                "%s: cast to the abstract target's dtype, which cannot hold every stored value: %s",
                self._reader.path,
                one_line(Row((leaf,), (what,)) for leaf, _, what in (text.rpartition(": ") for text in self._narrowed)),
            )

    def value(
        self, path: Path, leaf: LeafHandle | Derived, placing: placement.LeafPlacement | placement.TargetLeafSpec
    ) -> Any:
        """Return the value of a planned leaf in its final form.

        Args:
            path: key path in the target.
            leaf: the leaf.
            placing: the result of `plan`.
        """
        if isinstance(placing, placement.LeafPlacement):
            return self._finalize(placing)
        assert isinstance(leaf, Derived)
        value = self._compute(leaf)
        if isinstance(value, KeyData):
            with placement.all_transfers_allowed():
                return state_dict.join_key(value, target_shardings.of(placing.target))
        if isinstance(value, np.generic) and hasattr(placing.target, "shape"):
            value = np.array(value)
        if not isinstance(value, np.ndarray) and (not is_jax_array(value) or state_dict.is_prng_key(value)):
            return value
        self._compare(path, leaf, value, placing.target)
        if leaf.shape is None:
            self._check_value(_describe_derived(path, leaf), value, placing)
        result = _placed(value, placing)
        if placing.is_lossy:
            self._lost[_describe_derived(path, leaf)] = None
        return result

    def _check_value(self, name: str, value: Any, spec: placement.TargetLeafSpec) -> None:
        """Raise if a result of unforeseen shape and dtype cannot be cast or placed."""
        dtype = spec.dtype(value.dtype)
        if dtype != value.dtype and not casting.exists(value.dtype, dtype):
            raise no_cast(name, value.dtype, dtype, self._reader.path)
        if spec.sharding is not None and not self._sharding_fits[spec.sharding, tuple(value.shape)]:
            raise target_shardings.misfit(name, tuple(value.shape), spec.sharding, self._reader.path)

    def _finalize(self, leaf_placement: placement.LeafPlacement) -> Any:
        value = leaf_placement.finalize([self.values.pop() for _ in leaf_placement.reads])
        if leaf_placement.is_lossy:
            self._lost[show_path(leaf_placement.handle.path)] = None
        return value

    def _compare(self, path: Path, leaf: Derived, value: Any, target: Any) -> None:
        """Record an unforeseen shape, and a narrowing cast to an abstract target's dtype."""
        wanted, _ = shape_and_dtype(target)
        if leaf.shape is None and wanted is not None and tuple(value.shape) != wanted:
            self.shapes.append((path, tuple(value.shape), wanted))
        is_abstract = isinstance(target, jax.ShapeDtypeStruct) and not state_dict.is_prng_key(target) and not self._cast
        if is_abstract and not cast_losses.is_safe(value.dtype, target.dtype):
            self._narrowed.append(f"{show_path(path)}: {value.dtype} to {target.dtype}")

    def _compute(self, derived: Derived) -> Any:
        """Compute a derived leaf; an array is writable and shares no memory with any other leaf."""
        inputs, shared = [], []
        for one in derived.inputs:
            value = self._ready[one] if one in self._ready else self._input(one)
            inputs.append(value)
            self._uses[one] -= 1
            if self._uses[one]:
                self._ready[one] = value
                shared.append(value)
            elif self._ready.pop(one, None) is not None:
                shared.append(value)  # an earlier result may share its memory
        result = derived.function(*inputs)
        if not isinstance(result, np.ndarray):
            return result
        if not result.flags.carray or _is_of(result, shared) or id(result) in self._results:
            result = np.array(result, order="C")
        if derived.shape is None:
            # A caller's function may return one array for several leaves. Kept alive, so that its id stays its own.
            self._results[id(result)] = result
        return result

    def _input(self, one: Any) -> Any:
        if isinstance(one, Derived):
            return self._compute(one)
        if isinstance(one, FromCheckpoint):
            return self._finalize(self._placements.pop(one))
        return self.values.pop()


def _is_of(result: np.ndarray[Any, Any], values: list[Any]) -> bool:
    return any(isinstance(value, np.ndarray) and np.may_share_memory(result, value) for value in values)


def _placed(value: Any, spec: placement.TargetLeafSpec) -> Any:
    """Cast and place a derived array; a jax array without a target sharding stays where it is."""
    if isinstance(value, np.ndarray):
        return spec.place(value)
    dtype, sharding = spec.dtype(value.dtype), spec.sharding
    if value.dtype != dtype:
        spec.is_lossy = (
            spec.is_checked and value.is_fully_addressable and cast_losses.is_lossy(np.asarray(value), dtype)
        )
        value = value.astype(dtype)
    if sharding is None or value.sharding.is_equivalent_to(sharding, value.ndim):
        return value
    with placement.all_transfers_allowed():
        return jax.device_put(value, sharding)


def _describe_derived(path: Path, leaf: Derived) -> str:
    """Return a derived leaf's name for messages."""
    names = one_line(show_path(handle.path) for handle in leaf.handles)
    return f"{show_path(path)} ({leaf.how} of {names})"
