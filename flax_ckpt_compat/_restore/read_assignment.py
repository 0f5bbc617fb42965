"""Share out the arrays that several processes restore: which of them reads what."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.array_boxes import Box, Shape, shape_of
from flax_ckpt_compat._core.backend import ArraySlice, Format, LeafHandle, LeafKind
from flax_ckpt_compat._core.checksums import BLOCK_BYTES
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.jax_shards import normalize_index
from flax_ckpt_compat._core.keyed_cache import Memo
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import MANIFEST, MSGPACK_FILE, STEP_METADATA, TREE_METADATA
from flax_ckpt_compat._restore import casting, shardings
from flax_ckpt_compat._restore.device_exchange import Group
from flax_ckpt_compat._restore.plan import LeafPlan, TreePlan

_EXCHANGED = frozenset("biufcV")  # kinds of dtypes; V: those of ml_dtypes
# Arrays are cut into so many parts for each process if they are all that is read.
_CUTS = 4

_Array = np.ndarray[Any, Any]
# The distinct parts of an array, by start and shape, and the processes that want each.
_Holders = tuple[tuple[Shape, Shape, Group], ...]


class _Part(NamedTuple):
    """A part of a stored array that several processes want."""

    one: casting.Readable  # what one of them reads for it, of this dtype and shape
    dtype: np.dtype[Any]
    shape: Shape
    whole: LeafHandle | None = None  # the array that it is some rows of, and of which all want all

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shares:
    """The arrays of a restore, shared out among the processes: alike in all whose signatures are equal.

    Of an array on devices of one process, that process cannot tell whether each of the others has its own on devices of
    theirs, or none. It is shared out if their proposals are equal, too."""

    def __init__(
        self,
        plan: TreePlan,
        wanted: Sequence[casting.Readable],
        casts: Mapping[casting.Readable, casting.Cast],
        mapped: Set[casting.Readable],
    ) -> None:
        self._path, self._everyone, self._here = plan.path, tuple(range(jax.process_count())), jax.process_index()
        self._wanted, self.casts = wanted, dict(casts)
        # Those of arrays whose readers are certain, and of arrays on devices of one process; likewise what follows.
        self._parts: tuple[dict[Group, list[_Part]], dict[Group, list[_Part]]] = defaultdict(list), defaultdict(list)
        digests, numbers = (hashlib.sha256(), hashlib.sha256()), (dict[_Holders, int](), dict[_Holders, int]())
        files = dict[Location, None]()
        holders, is_of_one = Memo[_Holders](lambda key: self._holders(*key)), Memo(_is_of_one_process)
        for leaf, handle in _exchangeable(plan, mapped):
            held = holders.of((leaf.sharding, handle.shape, leaf.slices is None))
            of_one = is_of_one.of(shardings.of(leaf.target))
            files[handle.reader.location] = None
            number = numbers[of_one].setdefault(held, len(numbers[of_one]))
            # Arrays that several leaves share are cast later.
            is_late = leaf.cast is not None and not casts
            what = (handle.path, handle.shape, str(handle.dtype), str(leaf.cast), is_late, of_one or number)
            digests[False].update(repr(what).encode("utf-8", "surrogatepass"))
            if of_one:
                digests[True].update(repr(number).encode())
            here = {shardings.starts(part.index): part for part in leaf.slices or ()}
            for start, shape, group in held:
                if len(group) > 1 and self._here in group:
                    one = handle if leaf.slices is None else here[start]
                    dtype = casts[one].dtype if one in casts else np.dtype(handle.dtype)
                    self._parts[of_one][group].append(_Part(one, dtype, shape))
        digests[False].update(repr((list(numbers[False]), [_identity(file) for file in files])).encode())
        digests[True].update(repr(list(numbers[True])).encode())
        # Digest of the checkpoint and of what all processes want of it, as text.
        self.signature = f"arrays with the digest {digests[False].hexdigest()[:16]}"
        self.proposal = digests[True].hexdigest()[:16]

    def divide(self, *, agrees: bool) -> None:
        """Set what this process reads and what it does not, once it is known whether the proposals are equal."""
        parts, of_one = self._parts
        for group in of_one if agrees else ():
            parts[group] += of_one[group]
        self._readers = {group: list(_readers(list(_cut(parts[group], group)), group)) for group in parts}
        rows: list[casting.Readable] = []
        not_read = set[casting.Readable]()
        for part, reads in (pair for readers in self._readers.values() for pair in readers):
            if part.whole is not None:
                not_read.add(part.whole)
                if reads == self._here:
                    rows.append(part.one)
                    if part.whole in self.casts:
                        self.casts[part.one] = self.casts[part.whole]
            elif reads != self._here:
                not_read.add(part.one)
        # What it gets from other processes, in part or whole.
        self.others = [one for one in self._wanted if one in not_read]
        # What this process reads: its share, and what it alone wants.
        self.own = [*(one for one in self._wanted if one not in not_read), *rows]

    def arrays(self, values: dict[casting.Readable, Any]) -> dict[Group, dict[int, list[_Array]]]:
        """Return the arrays to exchange, by group and reading process; add those of other processes to the values."""
        groups = {}
        for group, readers in self._readers.items():
            for part, reads in readers:
                if reads == self._here and (part.whole is not None or isinstance(part.one, LeafHandle)):
                    (part.whole or part.one).reader.verify_rest(part.one)  # type: ignore[union-attr]
            arrays: dict[int, list[_Array]] = {process: [] for process in group}
            for part, reads in readers:
                arrays[reads].append(self._memory_of(part, values, is_read=reads == self._here))
            groups[group] = arrays
        return groups

    def _memory_of(self, part: _Part, values: dict[casting.Readable, Any], *, is_read: bool) -> _Array:
        """Return the memory of a part in the values, with its content if this process has read it."""
        found: _Array | None = values.pop(part.one) if is_read else None
        if found is not None and (found.shape, found.dtype) != (part.shape, part.dtype):
            raise CheckpointError(f"{self._path}: {part.one} was read as {found.dtype}{list(found.shape)}")
        if part.whole is None:
            values[part.one] = memory.empty(part.shape, part.dtype) if found is None else np.asarray(found, order="C")
            return values[part.one]  # type: ignore[no-any-return]
        if part.whole not in values:
            values[part.whole] = memory.empty(part.whole.shape, part.dtype)
        rows: _Array = values[part.whole][part.one.index]  # type: ignore[union-attr]
        if found is not None:
            rows[...] = found
        return rows

    def _holders(self, sharding: Any, shape: Shape, is_whole: bool) -> _Holders:
        is_own = sharding is None or sharding.is_fully_addressable  # each process has its own, alike
        found: dict[tuple[Shape, Shape], set[int]] = defaultdict(set)
        if is_whole:
            processes = () if is_own else {device.process_index for device in sharding.device_set}
            found[(0,) * len(shape), shape].update(processes)
        else:
            for device, index in sharding.devices_indices_map(shape).items():
                key = shardings.starts(index), shape_of(normalize_index(index, shape))
                found[key].add(device.process_index)
        everyone = self._everyone if is_own else None
        return tuple((*key, everyone or tuple(sorted(group))) for key, group in sorted(found.items()))


def _exchangeable(plan: TreePlan, mapped: Set[casting.Readable]) -> Iterator[tuple[LeafPlan, LeafHandle]]:
    """Yield the leaves that are stored arrays, each of which is read for no other leaf, and not mapped."""
    reader = plan.reader
    if reader.format is Format.MSGPACK and reader.location.is_remote and plan.options.verifies:
        return  # the one checksum of such an object is verified only where all of it is read
    uses = Counter(id(leaf.source) for leaf in plan.leaves)
    for leaf in plan.leaves:
        handle = leaf.source
        if not isinstance(handle, LeafHandle) or uses[id(handle)] > 1 or handle in mapped or not handle.nbytes:
            continue
        is_array = handle.kind is LeafKind.ARRAY and not handle.possible_kinds
        if is_array and handle.dtype is not None and handle.dtype.kind in _EXCHANGED:
            yield leaf, handle


def _cut(parts: Sequence[_Part], group: Group) -> Iterator[_Part]:
    """Yield the parts, large arrays cut into rows, so that processes can share one."""
    limit = max(BLOCK_BYTES, sum(part.nbytes for part in parts) // (_CUTS * len(group)))
    for part in parts:
        whole = part.one
        boxes = list(_rows(whole, limit)) if isinstance(whole, LeafHandle) and part.nbytes > limit else []
        if len(boxes) < 2:
            yield part
            continue
        assert isinstance(whole, LeafHandle)
        for box in boxes:
            yield _Part(ArraySlice(whole, box), part.dtype, shape_of(box), whole)


def _rows(handle: LeafHandle, limit: int) -> Sequence[Box]:
    """Return boxes of rows that cover an array, each of whole blocks that have a checksum; none if it has no such."""
    shape, reader = handle.shape, handle.reader
    if not shape or reader.chunks_of(handle)[1:] != shape[1:]:
        return ()
    row = handle.nbytes // shape[0]
    in_blocks = BLOCK_BYTES // math.gcd(row, BLOCK_BYTES)
    boxes = list(reader.boxes(handle, max(1, limit // row // in_blocks) * in_blocks * row))
    return boxes if all(shape_of(box)[1:] == shape[1:] for box in boxes) else ()


def _readers(parts: Sequence[_Part], group: Group) -> Iterator[tuple[_Part, int]]:
    """Yield which process of a group reads each part: neighbours, of about as many bytes for each process."""
    total, end = sum(part.nbytes for part in parts), 0
    for part in parts:
        yield part, group[(2 * end + part.nbytes) * len(group) // (2 * total)]
        end += part.nbytes


def _is_of_one_process(sharding: Any) -> bool:
    return sharding is not None and len({device.process_index for device in sharding.device_set}) == 1


def _identity(location: Location) -> bytes:
    """Return bytes that differ for two checkpoints with one path, such as on local disks of two machines."""
    if not location.isdir():
        return location.version()
    names = (MANIFEST, TREE_METADATA, STEP_METADATA, MSGPACK_FILE)
    files = {name: location / name for name in names if (location / name).isfile()}
    found = b"".join(hashlib.sha256(file.read()).digest() for file in files.values())
    if MANIFEST not in files:  # nothing else differs in any two saves of one tree
        found += b"".join(file.version() for file in files.values()) or os.urandom(16)
    return found
