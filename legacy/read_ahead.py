"""Guess which bytes of an object are read next while its structure is parsed, to request them at once.

The file holds the length of an array only where the array begins, so each large array costs a request that waits for
the one before. But layers repeat the same shapes in the same order, and so do the moments of an optimizer. Where
nothing repeats, arrays of a few MiB are read with what is between them: one request takes as long as many at once.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

_SLACK = 512  # bytes around a guess, because names differ in length
_SAME = 64  # bytes by which the distances of two repetitions differ at most
_CONTEXT = 8  # reads that are compared
_FIRST, _GROWTH, _MOST = 8, 8, 64  # guesses at once
_MOST_BYTES = 16 * 2**20
_PIECE = 2**20  # bytes of a request that reads on
_WORTH = 4  # arrays that reading on has to cover


class Guesses:
    """The reads of an object so far, and those that follow if they repeat."""

    def __init__(self, size: int):
        self._size = size
        self._steps: list[tuple[int, int]] = []  # of each read: distance from the one before, and length
        self._offset = self._end = 0
        self._number, self._misses = _FIRST, 0

    def record(self, offset: int, length: int) -> None:
        """Add a read."""
        self._steps.append((offset - self._offset, length))
        self._offset = offset

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges to request with the last read, which was no part of those returned before."""
        repeated = self._repeated()
        was_right = self._offset >= self._end > 0
        self._number = min(self._number * _GROWTH, _MOST) if was_right else _FIRST
        if repeated is None:
            distance, length = self._steps[-1]
            if distance < length:  # a window that is larger than what was skipped: it grows by itself
                return []
            self._misses += 1
            self._end = 0
            if self._misses > 1:
                return self._read_on()
            repeated = self._steps[-1:]
        else:
            self._misses = 0
        found, at, left = list[tuple[int, int]](), self._offset, _MOST_BYTES
        for number in range(self._number):
            distance, length = repeated[number % len(repeated)]
            at, left = at + distance, left - length
            if at >= self._size or left < 0:
                break
            self._end = at
            found.append((max(at - _SLACK, 0), min(at + length + _SLACK, self._size)))
        return _merged(found)

    def _repeated(self) -> list[tuple[int, int]] | None:
        """Return the reads since the current pattern of reads last occurred; None if it never did."""
        steps, longest, since = self._steps, 0, None
        for end in range(len(steps) - 1, 0, -1):
            length = 0
            while length < min(end, _CONTEXT) and _is_same(steps[end - 1 - length], steps[-1 - length]):
                length += 1
            if length > longest:
                longest, since = length, end
            if longest == _CONTEXT:
                break
        return None if since is None else steps[since:]

    def _read_on(self) -> list[tuple[int, int]]:
        """Return the bytes behind the last read, more of them each time, if several arrays like the last fit in."""
        nbytes = min(_PIECE << self._misses, _MOST_BYTES)
        distance, length = self._steps[-1]
        start = self._offset + length
        if nbytes < _WORTH * distance:
            return []
        stop = min(start + nbytes, self._size)
        return [(at, min(at + _PIECE, stop)) for at in range(start, stop, _PIECE)]


def _is_same(step: tuple[int, int], other: tuple[int, int]) -> bool:
    return abs(step[0] - other[0]) <= _SAME and step[1] == other[1]


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


class Buffers:
    """Ranges of an object in memory, up to a number of bytes."""

    def __init__(self, limit: int):
        self._left = limit
        self._offsets: list[int] = []
        self._data: list[bytes] = []

    def add(self, offset: int, data: bytes) -> None:
        """Keep a range if there is room."""
        if len(data) <= self._left:
            at = bisect.bisect_right(self._offsets, offset)
            self._offsets.insert(at, offset)
            self._data.insert(at, data)
            self._left -= len(data)

    def find(self, offset: int, length: int) -> list[memoryview] | None:
        """Return the parts of a range if all of it is there."""
        parts = []
        while length:
            index = bisect.bisect_right(self._offsets, offset) - 1
            start = offset - self._offsets[index] if index >= 0 else 0
            part = memoryview(self._data[index] if index >= 0 else b"")[start : start + length]
            if not part:
                return None
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts

    def contradict(self, data: memoryview, offset: int) -> bool:
        """Return whether a part of this range is here and differs."""
        for start, buffer in zip(self._offsets, self._data, strict=True):
            first, last = max(start, offset), min(start + len(buffer), offset + len(data))
            if (
                first < last
                and memoryview(buffer)[first - start : last - start] != data[first - offset : last - offset]
            ):
                return True
        return False
