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

from flax_ckpt_compat._core import memory, paths
from flax_ckpt_compat._core.backend import Format, LeafHandle, LeafKind
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.grid import Shape, shape_of
from flax_ckpt_compat._core.memo import Memo
from flax_ckpt_compat._core.orbax_layout import MANIFEST, STEP_METADATA, TREE_METADATA
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._core.tree import normalize_index
from flax_ckpt_compat._restore import casting, shardings
from flax_ckpt_compat._restore.device_exchange import Group
from flax_ckpt_compat._restore.plan import LeafPlan, TreePlan

_EXCHANGED = frozenset("biufcV")  # kinds of dtypes; V: those of ml_dtypes

_Array = np.ndarray[Any, Any]
# The distinct parts of an array, by start and shape, and the processes that want each.
_Holders = tuple[tuple[Shape, Shape, Group], ...]


class _Part(NamedTuple):
    """A part of a stored array that several processes want: what this one reads for it, and what that gives."""

    one: casting.Readable
    dtype: np.dtype[Any]
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shares:
    """The arrays of a restore, shared out among the processes: alike in all whose signatures are equal.

    Attributes:
        signature: digest of the checkpoint and of what all processes want of it, as text.
        own: what this process reads: its share, and what it alone wants.
        others: what it gets from other processes.
    """

    def __init__(
        self,
        plan: TreePlan,
        wanted: Sequence[casting.Readable],
        casts: Mapping[casting.Readable, casting.Cast],
        mapped: Set[casting.Readable],
    ) -> None:
        self._path, self._everyone, self._here = plan.path, tuple(range(jax.process_count())), jax.process_index()
        self._numbers: dict[_Holders, int] = {}
        parts: dict[Group, list[_Part]] = defaultdict(list)
        digest, files = hashlib.sha256(), dict[str, None]()
        holders = Memo[_Holders](lambda key: self._holders(*key))
        for leaf, handle in _exchangeable(plan, mapped):
            held = holders.of((leaf.sharding, handle.shape, leaf.slices is None))
            files[handle.reader.path] = None
            number = self._numbers.setdefault(held, len(self._numbers))
            # Arrays that several leaves share are cast later.
            is_late = leaf.cast is not None and not casts
            text = repr((handle.path, handle.shape, str(handle.dtype), str(leaf.cast), is_late, number))
            digest.update(text.encode("utf-8", "surrogatepass"))
            here = {shardings.starts(part.index): part for part in leaf.slices or ()}
            for start, shape, group in held:
                if len(group) > 1 and self._here in group:
                    one = handle if leaf.slices is None else here[start]
                    dtype = casts[one].dtype if one in casts else np.dtype(handle.dtype)
                    parts[group].append(_Part(one, dtype, shape))
        digest.update(repr((list(self._numbers), [_identity(path) for path in files])).encode())
        self.signature = f"arrays with the digest {digest.hexdigest()[:16]}"
        self._readers = {group: dict(_readers(parts[group], group)) for group in parts}
        not_read = {part.one for of in self._readers.values() for part, reads in of.items() if reads != self._here}
        self.others = [one for one in wanted if one in not_read]
        self.own = [one for one in wanted if one not in not_read]

    def arrays(self, values: dict[casting.Readable, Any]) -> dict[Group, dict[int, list[_Array]]]:
        """Return the arrays to exchange, by group and reading process; add those of other processes to the values.

        Raises:
            ChecksumError: a value that was read is not what was saved.
            CheckpointError: it is not what the other processes expect.
        """
        groups = {}
        for group, readers in self._readers.items():
            for part, reads in readers.items():
                if reads == self._here and isinstance(part.one, LeafHandle):
                    part.one.reader.verify_rest(part.one)
            arrays: dict[int, list[_Array]] = {process: [] for process in group}
            for part, reads in readers.items():
                if reads != self._here:
                    values[part.one] = memory.empty(part.shape, part.dtype)
                found = values[part.one]
                if (found.shape, found.dtype) != (part.shape, part.dtype) or not found.flags.c_contiguous:
                    raise CheckpointError(f"{self._path}: {part.one} was read as {found.dtype}{list(found.shape)}")
                arrays[reads].append(found)
            groups[group] = arrays
        return groups

    def _holders(self, sharding: Any, shape: Shape, is_whole: bool) -> _Holders:
        if sharding is None or sharding.is_fully_addressable:  # each process has its own, alike
            if is_whole:
                return (((0,) * len(shape), shape, self._everyone),)
            indices = sharding.devices_indices_map(shape).values()
            boxes = {shardings.starts(index): normalize_index(index, shape) for index in indices}
            return tuple((start, shape_of(box), self._everyone) for start, box in sorted(boxes.items()))
        if is_whole:
            group = tuple(sorted({device.process_index for device in sharding.device_set}))
            return (((0,) * len(shape), shape, group),)
        found: dict[tuple[Shape, Shape], set[int]] = defaultdict(set)
        for device, index in sharding.devices_indices_map(shape).items():
            key = shardings.starts(index), shape_of(normalize_index(index, shape))
            found[key].add(device.process_index)
        return tuple((*key, tuple(sorted(group))) for key, group in sorted(found.items()))


def _exchangeable(plan: TreePlan, mapped: Set[casting.Readable]) -> Iterator[tuple[LeafPlan, LeafHandle]]:
    """Yield the leaves that are stored arrays, each of which is read for no other leaf, and not mapped."""
    reader = plan.reader
    if reader.format is Format.MSGPACK and paths.is_url(reader.path) and plan.options.verifies:
        return  # the one checksum of such an object is verified only where all of it is read
    uses = Counter(id(leaf.source) for leaf in plan.leaves)
    for leaf in plan.leaves:
        handle = leaf.source
        if not isinstance(handle, LeafHandle) or uses[id(handle)] > 1 or handle in mapped or not handle.nbytes:
            continue
        is_array = handle.kind is LeafKind.ARRAY and not handle.possible_kinds
        if is_array and handle.dtype is not None and handle.dtype.kind in _EXCHANGED:
            yield leaf, handle


def _readers(parts: Sequence[_Part], group: Group) -> Iterator[tuple[_Part, int]]:
    """Yield which process of a group reads each part: neighbours, of about as many bytes for each process."""
    total, end = sum(part.nbytes for part in parts), 0
    for part in parts:
        yield part, group[(2 * end + part.nbytes) * len(group) // (2 * total)]
        end += part.nbytes


def _identity(path: str) -> bytes:
    """Return bytes that tell two checkpoints with one path apart, such as on local disks of two machines."""
    with translated(path, "read"):
        if not paths.isdir(path):
            changed = b"" if paths.is_url(path) else str(os.stat(path).st_mtime_ns).encode()
            return b"%d %b" % (paths.getsize(path), changed)
        files = [os.path.join(path, name) for name in (MANIFEST, TREE_METADATA, STEP_METADATA)]
        return b"".join(hashlib.sha256(paths.read(file)).digest() for file in files if paths.isfile(file))
