"""Hold the keys of an OCDBT database in arrays: a database of many hosts has millions, and a process looks up few."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from .files import ByteRange
from .ocdbt_encoding import Columns

INLINE, INDIRECT = 0, 1  # kinds of values
_Keys = TypeVar("_Keys", bound=Any)


def check_ascending(keys: _Keys) -> _Keys:
    """Return keys; raise ValueError if they do not ascend."""
    if np.any(keys[1:] <= keys[:-1]) if isinstance(keys, np.ndarray) else any(map(operator.ge, keys, keys[1:])):
        raise ValueError("keys in ascending order were expected, found others")
    return keys


class LeafRows:
    """The keys and values of a leaf node."""

    def __init__(self, columns: Columns, files: Sequence[str], prefix: bytes, count: int) -> None:
        self._names, self._prefix = files, prefix
        # All keys without the prefix, as an array padded with zeros if their lengths are alike.
        self.keys: Any = check_ascending(columns.keys(count))
        self.first = prefix + self.keys[0]  # the first key
        self._lengths, kinds = columns.numbers(count), columns.numbers(count)
        if int(kinds.max()) > INDIRECT:
            raise ValueError(f"values of the kinds {INLINE} and {INDIRECT} were expected, found {int(kinds.max())}")
        # Number of values in files up to each key.
        self._outside = np.cumsum(kinds, dtype=np.int64)
        outside = int(self._outside[-1])
        self._numbers, self._offsets = columns.numbers(outside), columns.numbers(outside)
        if outside and int(self._numbers.max()) >= len(files):
            raise ValueError(f"one of {len(files)} files was expected, found number {int(self._numbers.max())}")
        self._used = np.bincount(self._numbers, minlength=len(files)).nonzero()[0]
        self.files = [files[number] for number in self._used.tolist()]  # files with values
        inline = self._lengths[kinds == INLINE]
        self._values = columns.slices(inline.tolist())
        columns.finish()
        self._indirect = kinds.astype(bool)

    def find(self, key: bytes) -> bytes | ByteRange | None:
        """Return the value of a key, its byte range, or None if the key is absent."""
        if not key.startswith(self._prefix):
            return None
        row = self.row(key)
        if row == len(self.keys) or self.keys[row] != key[len(self._prefix) :]:
            return None
        outside = int(self._outside[row])
        if not self._indirect[row]:
            return self._values[row - outside]
        file = self._names[self._numbers[outside - 1]]
        return ByteRange(file, int(self._offsets[outside - 1]), int(self._lengths[row]))

    def row(self, key: bytes) -> int:
        """Return the number of keys before one that begins with the prefix."""
        return bisect.bisect_left(self.keys, key[len(self._prefix) :])

    def holds(self, prefix: bytes, names: Any) -> int:
        """Return how many of some ascending keys are here; 0 if others are between, or keys differ much in length.

        ``names`` is an array of what follows the prefix, padded with zeros."""
        start, begin = self.row(prefix + names[0]), len(prefix) - len(self._prefix)
        if not prefix.startswith(self._prefix) or not isinstance(self.keys, np.ndarray) or start == len(self.keys):
            return 0
        keys = self.keys[start : start + len(names)]
        if not all(key.startswith(prefix[len(self._prefix) :]) for key in (keys[0], keys[-1])):
            return 0
        found, wanted = (rows.view(np.uint8).reshape(len(keys), -1) for rows in (keys, names[: len(keys)]))
        width = min(found.shape[1] - begin, wanted.shape[1])
        same = np.array_equal(found[:, begin : begin + width], wanted[:, :width])
        return len(keys) if same and not (found[:, begin + width :].any() or wanted[:, width:].any()) else 0

    def ends(self) -> Iterator[tuple[str, int]]:
        """Yield files and the ends of the last values in them."""
        ends = np.zeros(len(self._names), np.uint64)
        lengths = self._lengths[self._indirect].astype(np.uint64)
        np.maximum.at(ends, self._numbers, self._offsets + lengths)
        return zip(self.files, ends[self._used].tolist(), strict=True)

    def __iter__(self) -> Iterator[bytes]:
        return (self._prefix + key for key in self.keys)


class RowEntries(Mapping[bytes, bytes | ByteRange]):
    """The keys and values of all leaf nodes, in their order."""

    def __init__(self, leaves: Sequence[LeafRows]) -> None:
        self._leaves, self._firsts = leaves, check_ascending([leaf.first for leaf in leaves])

    def __getitem__(self, key: bytes) -> bytes | ByteRange:
        value: bytes | ByteRange | None = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def get(self, key: bytes, default: Any = None) -> Any:
        """Return the value of a key, its byte range, or a default."""
        at = bisect.bisect_right(self._firsts, key)
        value = self._leaves[at - 1].find(key) if at else None
        return default if value is None else value

    def __iter__(self) -> Iterator[bytes]:
        return (key for leaf in self._leaves for key in leaf)

    def __len__(self) -> int:
        return sum(len(leaf.keys) for leaf in self._leaves)

    def holds(self, prefix: bytes, names: Any) -> bool:
        """Return whether all of some keys are here, as `LeafRows.holds` finds them."""
        at = bisect.bisect_right(self._firsts, prefix + names[0]) - 1
        while len(names) and 0 <= at < len(self._leaves):
            count = self._leaves[at].holds(prefix, names)
            if not count:
                return False
            names, at = names[count:], at + 1
        return not len(names)

    def files(self) -> set[str]:
        """Return the files with values."""
        return {file for leaf in self._leaves for file in leaf.files}

    def ends(self) -> Iterator[tuple[str, int]]:
        """Yield files and the ends of values in them; the last of a leaf node for each."""
        return (one for leaf in self._leaves for one in leaf.ends())


Entries = dict[bytes, bytes | ByteRange] | RowEntries


def files_of(entries: Entries) -> set[str]:
    """Return the files with values."""
    if isinstance(entries, RowEntries):
        return entries.files()
    return {value.file for value in entries.values() if type(value) is ByteRange}


def ends_of(entries: Entries) -> dict[str, int]:
    """Return file → end of the last value in it."""
    if isinstance(entries, RowEntries):
        ends = entries.ends()
    else:
        ends = ((value.file, value.offset + value.length) for value in entries.values() if type(value) is ByteRange)
    found: dict[str, int] = {}
    for file, end in ends:
        if end > found.get(file, -1):
            found[file] = end
    return found
