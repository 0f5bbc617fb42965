"""Execute a plan: one read for all leaves, then casts, placement and derived values, leaf after leaf."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from flax_ckpt_compat._core import backend, memory
from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.text_formatting import Row, one_line
from flax_ckpt_compat._core.tree import KeyData, Path, is_jax_array, show_path
from flax_ckpt_compat._restore import casting, leaf_kinds, placement
from flax_ckpt_compat._restore.leaf_plans import describe_derived, no_cast
from flax_ckpt_compat._restore.plan import LeafPlan, ShapeDifference, TreePlan
from flax_ckpt_compat._trees import prng_keys
from flax_ckpt_compat._trees.leaf_sources import Derived, FunctionInput, Own, shape_and_dtype

_log = logging.getLogger("flax_ckpt_compat")


class Execution:
    """One execution of a plan: `read` all that it needs, then `place` it."""

    def __init__(self, plan: TreePlan):
        self._plan, self._path = plan, plan.path
        # Casts by leaf; each notes whether it lost values.
        self._casts: dict[LeafPlan, casting.Cast] = {}
        self._lost: list[str] = []
        self._narrowed: list[Row] = []  # leaves and dtypes of an abstract target's casts that may lose values
        self._abstract: list[str] = []  # leaves of the target that are kept and have no values
        self._values: dict[LeafHandle, Any] = {}  # what was read and not used yet
        self._take: Callable[[Any], Any]  # of `read`: returns a value that was read, which nothing else holds
        self._shapes: list[ShapeDifference] = []  # shapes of function results that are not the target's
        # Inputs of derived leaves: several leaves may share one, and each is read or computed once.
        self._uses: Counter[Any] = Counter()
        self._ready: dict[Any, Any] = {}
        self._casts_at_read: dict[LeafHandle, casting.Cast] = {}  # of what is cast as soon as it is read
        self._mapped: set[LeafHandle] = set()  # what may be memory-mapped
        reads: list[LeafHandle] = []
        for leaf in plan.leaves:
            if leaf.is_plain:
                reads.append(leaf.source)  # type: ignore[arg-type]
            else:
                self._add_reads(leaf, reads)
            if plan.options.settings.mapped and leaf.sharding is None and isinstance(leaf.source, LeafHandle):
                self._mapped.add(leaf.source)
        self._reads = list(dict.fromkeys(reads))  # what to read, each once
        # How many leaves are still to get each value; empty if none is read for several.
        self._left = Counter(reads if len(self._reads) < len(reads) else ())
        if self._left:
            self._casts_at_read.clear()  # each user of a shared leaf casts it

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays that are read."""
        return sum([one.nbytes for one in self._reads if one.dtype is not None])

    def read(self, meter: Meter = OFF) -> Execution:
        """Read the values, and return the object itself, which has them."""
        reads = self._reads
        if self._casts_at_read or self._mapped:
            self._values = casting.read(reads, self._casts_at_read, self._mapped, meter)
        elif reads:
            self._values = dict(zip(reads, backend.read_all(reads, meter=meter), strict=True))
        elif self._plan.target is None:
            self._plan.reader.read([])  # which verifies a file of numbers alone
        self._take = self._take_shared if self._left else self._values.pop
        return self

    def place(self) -> tuple[list[Any], list[ShapeDifference]]:
        """Compute and place the values that were read.

        Nothing but the result holds a value once it is placed, so that no memory is held twice. Return the values in
        the order of the plan's leaves, and the shapes that differ from the target's and were known only once functions
        had computed them."""
        leaves, take = self._plan.leaves, self._take
        results = [take(leaf.source) if leaf.is_plain else self._unplaced(leaf) for leaf in leaves]
        with placement.transfers_allowed(), memory.pause_gc():
            for at, leaf in enumerate(leaves):
                if leaf.slices:
                    results[at] = placement.assembled(leaf, results[at])
                elif leaf.is_plain and leaf.sharding is not None:
                    results[at] = placement.on_devices(results[at], leaf.sharding)
        self._log_warnings()
        return results, self._shapes

    def _add_reads(self, leaf: LeafPlan, reads: list[LeafHandle]) -> None:
        source = leaf.source
        if isinstance(source, Derived):
            self._add_inputs(source, reads)
        if not isinstance(source, LeafHandle):
            return
        mine: list[LeafHandle] = [source] if leaf.slices is None else [*leaf.slices]
        reads.extend(mine)
        if leaf.cast is not None:
            is_number = source.kind is not LeafKind.ARRAY
            cast = self._casts[leaf] = self._cast(leaf, source.path, source.dtype, is_number=is_number)
            if source.kind is LeafKind.ARRAY and not source.possible_kinds:
                self._casts_at_read.update((one, cast) for one in mine)

    def _add_inputs(self, derived: Derived, reads: list[LeafHandle]) -> None:
        for one in derived.inputs:
            self._uses[one] += 1
            if self._uses[one] > 1:
                continue
            if isinstance(one, Derived):
                self._add_inputs(one, reads)
            elif isinstance(one, FunctionInput):
                self._add_reads(self._plan.inputs[one], reads)
            else:
                reads.append(one)

    def _take_shared(self, one: Any) -> Any:
        """Return a value that several leaves may use: each but the last gets a copy."""
        self._left[one] -= 1
        return copy.deepcopy(self._values[one]) if self._left[one] > 0 else self._values.pop(one)

    def _unplaced(self, leaf: LeafPlan) -> Any:
        """Return the final value of a leaf; of one that is read in slices, these, cast, for `placement.assembled`."""
        source = leaf.source
        if isinstance(source, Derived):
            return self._finish_derived(leaf, source)
        if not isinstance(source, LeafHandle):
            if source is Own.KEEP_TARGET and isinstance(leaf.target, jax.ShapeDtypeStruct):
                self._abstract.append(show_path(leaf.path))
            return leaf.target if source is Own.KEEP_TARGET else None
        cast = self._casts.get(leaf)
        if leaf.slices is None:
            value = placement.finish(leaf, source, self._take(source), cast)
        elif leaf.slices:
            value = list(map(self._take, leaf.slices))
            if cast is not None:
                value = list(map(cast, value))
        else:
            dtype = source.dtype if leaf.cast is None else leaf.cast
            value = prng_keys.without_shards(source.shape, dtype, leaf.sharding)
        if cast is not None and cast.is_lossy:
            self._lost.append(show_path(source.path))
        return value

    def _finish_derived(self, leaf: LeafPlan, source: Derived) -> Any:
        value = self._compute(source)
        if isinstance(value, KeyData):
            with placement.all_transfers_allowed():
                return prng_keys.join_key(value, placement.sharding_of(leaf.target))
        if isinstance(value, np.generic) and hasattr(leaf.target, "shape"):
            value = np.array(value)
        if source.shape is None and leaf.target is not None:
            policy = self._plan.options.settings.kind_mismatch
            leaf_kinds.check_computed(describe_derived(leaf.path, source), value, leaf.target, self._path, policy)
        if not isinstance(value, np.ndarray) and (not is_jax_array(value) or prng_keys.is_prng_key(value)):
            return value
        if source.shape is None:
            self._check_unforeseen(leaf, source, value)
        cast = None if leaf.cast is None else self._cast(leaf, leaf.path, value.dtype)
        put = placement.put if isinstance(value, np.ndarray) else placement.put_jax_array
        value = put(value, leaf.sharding, cast)
        if cast is not None and cast.is_lossy:
            self._lost.append(describe_derived(leaf.path, source))
        return value

    def _cast(self, leaf: LeafPlan, path: Path, dtype: Any, *, is_number: bool = False) -> casting.Cast:
        """Return a leaf's cast: numbers, and all by a setting, are checked for lost values; else note a narrowing."""
        is_checked = self._plan.options.casts or is_number
        if not is_checked and not casting.is_safe(dtype, leaf.cast):
            self._narrowed.append(Row((show_path(path),), (f"{dtype} to {leaf.cast}",)))
        return casting.Cast(leaf.cast, is_checked)

    def _check_unforeseen(self, leaf: LeafPlan, source: Derived, value: Any) -> None:
        """Record a shape that only a function knew; raise if the result cannot be cast or placed."""
        name, shape = describe_derived(leaf.path, source), tuple(value.shape)
        wanted, _ = shape_and_dtype(leaf.target)
        if wanted is not None and shape != wanted:
            self._shapes.append((leaf.path, shape, wanted))
        if leaf.cast is not None and leaf.cast != value.dtype and not casting.exists(value.dtype, leaf.cast):
            raise no_cast(name, value.dtype, leaf.cast, self._path)
        if leaf.sharding is not None and not placement.fits(leaf.sharding, shape):
            raise placement.misfit(name, shape, leaf.sharding, self._path)

    def _compute(self, derived: Derived) -> Any:
        """Compute a derived leaf; an array is writable and shares no memory with any other leaf."""
        inputs, shared = [], []
        for one in derived.inputs:
            was_ready = one in self._ready
            value = self._ready.pop(one) if was_ready else self._input(one)
            inputs.append(value)
            self._uses[one] -= 1
            if self._uses[one]:
                self._ready[one] = value
            if self._uses[one] or was_ready:  # an earlier result may share its memory
                shared.append(value)
        result = derived.function(*inputs)
        if not isinstance(result, np.ndarray):
            return result
        is_shared = any(isinstance(one, np.ndarray) and np.may_share_memory(result, one) for one in shared)
        # A function of the user may return one array for several leaves.
        is_users = derived.shape is None
        return np.array(result, order="C") if is_users or is_shared or not result.flags.carray else result

    def _input(self, one: Any) -> Any:
        if isinstance(one, Derived):
            return self._compute(one)
        if not isinstance(one, FunctionInput):
            return self._take(one)
        leaf = self._plan.inputs[one]
        value = self._unplaced(leaf)
        if not leaf.slices:
            return value
        with placement.transfers_allowed():
            return placement.assembled(leaf, value)

    def _log_warnings(self) -> None:
        """Log which casts lost values or may have, and which arrays jax cannot hold."""
        found: dict[str, Collection[str | Row]] = {
            "cast to the target's dtype, which does not hold all values": dict.fromkeys(self._lost),
            "64 bits without jax's x64, or no dtype of jax: whole arrays stay in host memory, without the target's "
            "sharding; set jax_enable_x64, or cast": dict.fromkeys(self._plan.unsharded),
            "kept from the target, which is abstract there, so that the result has a jax.ShapeDtypeStruct and no "
            "values; put arrays into the target, or into the result": self._abstract,
            "cast to the abstract target's dtype, which cannot hold every stored value": self._narrowed,
        }
        for what, leaves in found.items():
            if leaves:
                _log.warning("%s: %s: %s", self._path, what, one_line(leaves))
