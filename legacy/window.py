"""Reading a file front to back in small windows, so that array data can be skipped over."""

from __future__ import annotations

from flax_ckpt_compat._core.errors import CorruptCheckpointError

from .peek import last_key
from .source import Source

# More than any header needs: 64 dimensions of nine bytes and a dtype name.
LOOKAHEAD = 2048
_WORTH_SKIPPING = 2 * 2**10
_REMEDY = "restore another checkpoint, copy this one anew, or look whether it is a checkpoint at all"


class Window:
    """A stretch of the file in memory.

    Attributes:
        data: the bytes of the stretch; the next value starts at ``data[at]``.
        at: position in ``data``; beyond its end after a skip.
        fresh_until: while ``at`` is not above this, `LOOKAHEAD` bytes, or the rest of the file, or at least all of the
            value that comes next, up to an array's data, are in ``data``.
        size: of the file, in bytes.
        path: of the file.
    """

    __slots__ = (
        "_largest",
        "_smallest",
        "_source",
        "_step",
        "_through",
        "_tiny",
        "at",
        "base",
        "data",
        "fresh_until",
        "path",
        "size",
    )

    def __init__(self, source: Source):
        self._source = source
        self._step, self._tiny, self._smallest, self._largest, self._through = source.steps
        self._step //= 2  # the first refill doubles it
        self.path = source.path
        self.size = source.size
        self.base = self.at = 0
        self.data = b""
        self.fresh_until = -1

    def refill(self) -> None:
        """Moves the window to the current position; small steps after a jump that pays, growing ones without."""
        skipped = self.at - len(self.data)
        self._step = self._smallest if skipped > self._through else min(self._step * 2, self._largest)
        self.base += self.at
        self.at = 0
        if skipped > _WORTH_SKIPPING and self.size - self.base > self._tiny > 0:
            self.data = self._pread(self._tiny, self.base)
            self.fresh_until = last_key(self.data)
            if self.fresh_until >= 0:
                return
        self.data = self._pread(min(self._step, self.size - self.base), self.base)
        whole = self.base + len(self.data) == self.size
        self.fresh_until = self.size if whole else len(self.data) - LOOKAHEAD

    def take(self, length: int) -> bytes:
        """The next ``length`` bytes, which may reach beyond the window."""
        end = self.claim(length)
        piece = self.data[self.at : end] if end <= len(self.data) else self._pread(length, self.base + self.at)
        self.at = end
        if end > self.fresh_until:
            self.refill()
        return piece

    def claim(self, length: int) -> int:
        """The position behind the next ``length`` bytes, once the file is known to have as many."""
        end = self.at + length
        if self.base + end > self.size:
            left = self.size - self.base - self.at
            raise self.corrupt(f"a value of {length} bytes, but the file has only {max(left, 0)} left; it is truncated")
        return end

    def corrupt(self, found: str, at: int | None = None) -> CorruptCheckpointError:
        """The error for something at ``at`` (default: here) that is not as it must be."""
        offset = self.base + (self.at if at is None else at)
        message = f"{self.path}: byte {offset}: expected a Flax msgpack checkpoint, found {found}"
        return CorruptCheckpointError(f"{message}; {_REMEDY}", path=self.path)

    def _pread(self, length: int, offset: int) -> bytes:
        data = self._source.read(length, offset)
        if len(data) != length:
            found = f"the end of the file {len(data)} bytes into a read of {length}; it shrank"
            raise self.corrupt(found, offset - self.base)
        return data
