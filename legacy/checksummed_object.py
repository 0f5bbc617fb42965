"""Read a whole object of a store that reports the CRC-32C of its objects, and compare them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.errors import ChecksumError
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.thread_pools import in_parallel

from .byte_ranges import Span, truncated
from .checksummed_file import copy_parts, parts_by_unit
from .read_bytes import StoredObject

_UNIT = 16 * 2**20  # bytes of a request


def read_object(source: StoredObject, spans: Sequence[Span], values: list[Any], meter: Meter = OFF) -> bool:
    """Read spans and the bytes between them; return False, without reading, if the store reports no CRC-32C.

    Raise ChecksumError if the bytes are not those of the store, also when they are read again."""
    expected = source.location.storage.stored_crc32c(source.path) if checksums.crc32c is not None else None
    if expected is None:
        return False
    for again in (False, True):
        found = _read(source, spans, values, meter, again=again)
        if found == expected:
            return True
    raise ChecksumError(
        f"{source.path}: the bytes that arrive have the CRC-32C {found:08x}, the store reports {expected:08x}; they "
        "are changed in transit, or the store is damaged. Check the proxy before the store, or restore an older "
        "step. To read it as it is, set checksums='off'",
        path=source.path,
    )


def _read(source: StoredObject, spans: Sequence[Span], values: list[Any], meter: Meter, *, again: bool) -> int:
    """Read everything and return its CRC-32C; ``again`` reads also what opening has read."""
    parts, starts = parts_by_unit(spans, values, _UNIT), range(0, source.size, _UNIT)

    def read(start: int) -> int:
        length, wanted = min(_UNIT, source.size - start), parts.get(start // _UNIT, [])
        cached = None if again else source.cached(length, start)
        data = source.read_again(length, start) if cached is None else cached
        if len(data) < length:
            raise truncated(source, next(span for _, _, span in wanted)) if wanted else _changed(source)
        view = memoryview(data)
        if cached is None and source.contradicts(view, start):
            raise _changed(source)
        copy_parts([(part, view[part[0] - start : part[1] - start]) for part in wanted], values)
        if wanted and meter.is_on:
            meter.add(sum([stop - at for at, stop, _ in wanted]), wanted[-1][2].handle.path)
        return int(checksums.crc32c(data))

    found = 0
    for start, checksum in zip(starts, in_parallel(read, starts, source.threads), strict=True):
        nbytes = min(_UNIT, source.size - start)
        found = checksums.combine(found, checksum, nbytes, checksums.CRC32C_POLYNOMIAL)
    return found


def _changed(source: StoredObject) -> ChecksumError:
    return ChecksumError(
        f"{source.path}: the bytes read when it was opened differ from those read later, so some were changed in "
        "transit; restore it again",
        path=source.path,
    )
