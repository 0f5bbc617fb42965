"""Log one line for each save and restore: bytes, seconds, and where the time went."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from flax_ckpt_compat._core.text_formatting import format_size, printable
from flax_ckpt_compat._core.tree import KeyData

_log = logging.getLogger("flax_ckpt_compat")


class Stopwatch:
    """The seconds of each phase of a save or restore, in order."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._phases: dict[str, float] = {}
        self._nbytes = 0

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now = time.perf_counter()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def count(self, nbytes: Callable[[], int]) -> None:
        """Take the bytes that are read or written, for `log`; they are computed only if somebody listens."""
        if _log.isEnabledFor(logging.INFO):
            self._nbytes = nbytes()

    def log(self, done: str, path: str) -> None:
        """Log what was ``done`` ("Saved" or "Restored") at INFO."""
        if not _log.isEnabledFor(logging.INFO):
            return
        nbytes = self._nbytes
        seconds = self._last - self._start
        phases = ", ".join(f"{phase} {length:.3f}" for phase, length in self._phases.items())
        rate = f", {nbytes / seconds / 1e9:.2f} GB/s" if seconds > 0 else ""
        _log.info("%s %s: %s in %.3f s%s (%s)", done, printable(path), format_size(nbytes), seconds, rate, phases)


def nbytes_of(leaves: Iterable[Any]) -> int:
    """Return the bytes of arrays or leaf handles."""
    return sum(map(_nbytes, leaves))


def _nbytes(leaf: Any) -> int:
    nbytes = getattr(leaf.data if isinstance(leaf, KeyData) else leaf, "nbytes", 0)
    return nbytes if isinstance(nbytes, int) else 0
