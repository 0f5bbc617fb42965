"""Decode the body of an OCDBT manifest or node: columns of numbers and bytes, checked against its bounds."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import numpy as np

# OCDBT's limit of keys and paths.
_MAX_NAME = 65535
# Names share prefixes, so few bytes can encode very many.
_MAX_NAMES = 1 << 30
_VARINT_BYTES = 10  # of 64 bits


class Columns:
    """A sequential reader of columns."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._bytes = np.frombuffer(data, np.uint8)
        self._at = 0

    def take(self, count: int) -> bytes:
        """Return the next bytes.

        Raises:
            ValueError: fewer are left, here and in the methods below.
        """
        left = len(self._data) - self._at
        if count > left:
            raise ValueError(f"{count} bytes were expected at byte {self._at}, found {left}")
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self) -> int:
        """Return the next byte."""
        return self.take(1)[0]

    def varint(self) -> int:
        """Return the next number."""
        return self.varints(1)[0]

    def varints(self, count: int) -> list[int]:
        """Return the next column of varints (7 bits a byte, lowest first)."""
        found = self._bytes[self._at : self._at + count]
        if len(found) == count and not np.any(found & 0x80):
            self._at += count
            column: list[int] = found.tolist()
            return column
        return self._long_varints(count)

    def _long_varints(self, count: int) -> list[int]:
        window = self._bytes[self._at : self._at + _VARINT_BYTES * count]
        ends = np.flatnonzero(window < 0x80)[:count]
        if len(ends) < count:
            raise ValueError(f"{count} numbers were expected at byte {self._at}, found {len(ends)}")
        starts = np.concatenate([[0], ends[:-1] + 1])
        widths = ends - starts + 1
        longest = int(widths.max())
        if longest > _VARINT_BYTES or np.any(window[ends[widths == _VARINT_BYTES]] > 1):
            raise ValueError(f"numbers of 64 bits were expected at byte {self._at}, found a longer one")
        numbers = np.zeros(count, np.uint64)
        for place in range(longest):
            wide = widths > place
            digits = (window[starts[wide] + place] & 0x7F).astype(np.uint64)
            numbers[wide] |= digits << np.uint64(7 * place)
        self._at += int(ends[-1]) + 1
        column: list[int] = numbers.tolist()
        return column

    def name_lengths(self, count: int) -> tuple[list[int], list[int]]:
        """Return two columns for `names`: lengths of the prefix shared with the name before, and of the rest."""
        return [0, *self.varints(count - 1)] if count else [], self.varints(count)

    def names(self, shared: Sequence[int], own: Sequence[int]) -> list[bytes]:
        """Return the names of which these are the lengths."""
        lengths = list(map(operator.add, shared, own))
        if max(lengths, default=0) > _MAX_NAME or sum(lengths) > _MAX_NAMES:
            raise ValueError(
                f"names of up to {_MAX_NAME} bytes, {_MAX_NAMES} in all, were expected, found "
                f"{max(lengths)} and {sum(lengths)}"
            )
        if any(map(operator.gt, shared[1:], lengths)):
            raise ValueError("a name was expected to share no more bytes than the one before has")
        names, before, at = [], b"", 0
        text = self.take(sum(own))
        for count, more in zip(shared, own, strict=True):
            before = before[:count] + text[at : at + more]
            at += more
            names.append(before)
        return names

    def slices(self, lengths: Sequence[int]) -> list[bytes]:
        """Return the next byte strings, of these lengths."""
        text = self.take(sum(lengths))
        return [text[end - length : end] for length, end in zip(lengths, itertools.accumulate(lengths), strict=True)]

    def finish(self) -> None:
        """Check that no bytes are left.

        Raises:
            ValueError: some are.
        """
        if self._at != len(self._data):
            raise ValueError(f"the end was expected at byte {self._at}, found {len(self._data) - self._at} more bytes")
