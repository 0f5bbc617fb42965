"""Find the size of an object in a store that reports it only for a range that begins inside and ends beyond."""

from __future__ import annotations

from collections.abc import Callable

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.thread_pools import results_of

BEYOND_END = 5 * 2**40  # bytes; no store takes a larger object
# Bytes that arrive as fast as one.
_HEAD_BYTES, _TAIL_BYTES = 64 * 2**10, 256 * 2**10
_POWERS = [4**power for power in range(8, 22)]  # from 64 KiB to 4 TiB
_AT_ONCE = 16


def probed_size(url: str, read: Callable[[int, int], bytes | int]) -> int:
    """Return the size that the store reports for a range at the end, found by reading single bytes, many at once.

    ``read`` returns the bytes from one position to another, or the size, or -1, of an object that ends before."""
    first = read(0, _HEAD_BYTES)
    if isinstance(first, int):
        return max(first, 0)  # without a first byte the range begins beyond the end
    low, high, probes = _HEAD_BYTES, BEYOND_END, list[int](_POWERS)  # there is a byte before low, and none at high
    while high - low > _TAIL_BYTES:
        inside = [at for at in probes if low <= at < high]
        found = results_of(lambda at: isinstance(read(at, at + 1), bytes), inside, _AT_ONCE)
        low = max([low, *(at + 1 for at, is_there in found.items() if is_there)])
        high = min([high, *(at for at, is_there in found.items() if not is_there)])
        probes = list(range(low, high, max(1, (high - low) // _AT_ONCE)))
    last = read(low - 1, max(high, low) + 1)
    if not isinstance(last, int) or last < 0:
        raise StorageError(f"{url} was replaced while its size was looked up; try again", path=url)
    return last
