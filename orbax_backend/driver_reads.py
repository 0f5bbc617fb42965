"""Read stored arrays through TensorStore's zarr drivers: chunks with a codec, and those that only it can locate."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorstore as ts

from flax_ckpt_compat._core import array_boxes
from flax_ckpt_compat._core.errors import (
    CheckpointError,
    ChecksumError,
    CorruptCheckpointError,
    UnrecognizedFormatError,
)
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.orbax_layout import key_prefix
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.storage_errors import read_errors
from flax_ckpt_compat._core.thread_pools import in_parallel

from .files import tensorstore_context
from .open_index import Index
from .read_plan import ArrayRead, Copy, by_chunk, scatter

THREADS = min(8, 2 * (os.cpu_count() or 1))
_CACHE_BYTES = 64 << 20
# Of TensorStore.
_CHECKSUM_ERROR, _UNKNOWN_CODEC = "Digest mismatch", "is not registered"


class DriverReader:
    """Reads arrays of one open checkpoint."""

    def __init__(self, location: Location, index: Index, fills_missing: bool) -> None:
        self._location, self._index, self._fills_missing = location, index, fills_missing
        self._context = tensorstore_context(location, _CACHE_BYTES)

    def open(self, read: ArrayRead) -> Any:
        """Start to open an array; return TensorStore's future."""
        spec = {
            "driver": read.info.driver,
            "kvstore": self._index.kvstore(key_prefix(read.name)),
            "fill_missing_data_reads": self._fills_missing and read.info.has_fill_value,
        }
        with self._tensorstore_errors(read):
            return ts.open(spec, open=True, read=True, context=self._context)

    def read(self, opened: Sequence[tuple[list[ArrayRead], Any]], meter: Meter) -> None:
        """Fill the ``array`` of reads, which is allocated; ``opened`` has all reads of an array, and its future."""
        started: list[tuple[ArrayRead, Any]] = []
        shared: list[tuple[list[ArrayRead], Any]] = []
        for group, future in opened:
            with self._tensorstore_errors(group[0]):
                store = self._location.wait(future)
                if store.shape != group[0].info.shape:
                    raise ValueError(f"the shape {store.shape} was expected to be {group[0].info.shape}")
                if _share_chunks(group):
                    shared.append((group, store))
                else:
                    started += [(read, _start_copy(read, store)) for read in group]
        nbytes = sum(read.nbytes for read, _ in started)
        for read, copied in started:
            with self._tensorstore_errors(read):
                self._location.wait(copied, nbytes)
            if not read.array.dtype.isnative:
                read.array.view(read.array.dtype.newbyteorder()).byteswap(inplace=True)
            meter.add(read.nbytes, read.path)
        for group, store in shared:
            with self._tensorstore_errors(group[0]):
                # Each chunk is decoded once for all boxes in it.
                wanted = [(part.start, copies) for part, _, copies in by_chunk(group)]
                in_parallel(functools.partial(_read_chunk, self._location, store), wanted, THREADS)
            meter.add(sum([read.nbytes for read in group]), group[0].path)

    def _tensorstore_errors(self, read: ArrayRead) -> AbstractContextManager[None]:
        """Translate TensorStore's errors about one array."""

        def damaged(error: Exception) -> CheckpointError:
            if _UNKNOWN_CODEC in str(error):
                what = f"the codec of {read.keystr!r} is not known to TensorStore ({error}); update tensorstore, or"
                message = f"{self._location.path}: {what} restore the other leaves only"
                return UnrecognizedFormatError(message, path=self._location.path, leaf=read.keystr)
            kind = ChecksumError if _CHECKSUM_ERROR in str(error) else CorruptCheckpointError
            return corrupt_array(self._location.path, read, str(error), kind)

        return read_errors(self._location.path, damaged, (ValueError, OSError, NotImplementedError))


def corrupt_array(
    path: str, read: ArrayRead, what: str, error: type[CorruptCheckpointError] = CorruptCheckpointError
) -> CorruptCheckpointError:
    """Return the error for an array that cannot be read."""
    return error(
        f"{path}: the array {read.keystr!r} (stored as {read.name!r}) cannot be read: {what}; "
        f"restore the files from a backup, or restore the other leaves only",
        path=path,
        leaf=read.keystr,
    )


def _start_copy(read: ArrayRead, store: Any) -> Any:
    """Start TensorStore's copy into the array, in native byte order."""
    array = read.array
    native = array if array.dtype.isnative else array.view(array.dtype.newbyteorder())
    box = read.layout.box
    wanted = store if box is None else store[box][ts.d[:].translate_to[0]]
    return ts.array(native).write(wanted)


def _share_chunks(group: Sequence[ArrayRead]) -> bool:
    """Return whether several reads share chunks; only TensorStore fills in missing ones, so all must be stored."""
    return (
        len(group) > 1
        and all(read.complete for read in group)
        and any(len(copies) > 1 for _, _, copies in by_chunk(group))
    )


def _read_chunk(location: Location, store: Any, wanted: tuple[array_boxes.Shape, list[Copy]]) -> None:
    start, copies = wanted
    inner = array_boxes.bounding_box([copy.source for copy in copies])
    box = tuple(slice(at + side.start, at + side.stop) for at, side in zip(start, inner, strict=True))
    values = location.wait(store[box].read(), math.prod(array_boxes.shape_of(box)) * store.dtype.numpy_dtype.itemsize)
    scatter(values, [Copy(array_boxes.relative_to(copy.source, inner), copy.array, copy.target) for copy in copies])
