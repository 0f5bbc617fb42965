"""Report the progress of saves and restores: `Meter` counts bytes, and the user's callback gets a `Progress`.

It also logs one line for each: bytes, seconds, and where the time went. The setting ``progress="bar"`` stands for a
callback that draws a bar on a terminal."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

from flax_ckpt_compat._core.errors import is_of_handler
from flax_ckpt_compat._core.text_formatting import format_size, printable
from flax_ckpt_compat._core.tree import Path, show_path

_log = logging.getLogger("flax_ckpt_compat")
_EVERY_SECONDS = 0.2
BAR = "bar"  # value of the setting ``progress``
_NAME_WIDTH, _BAR_WIDTH = 32, 20
_LOCKED_SECONDS = 1.0  # how long the last report waits for a call that is under way


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """One report of a save or restore: what its ``progress`` callback gets.

    Attributes:
        doing: ``"save"`` or ``"restore"``.
        path: path of the checkpoint.
        name: leaf or file in work; empty in the last report.
        done: bytes of arrays that are done, fewer than ``total`` until the last report.
        total: bytes of all arrays that this process saves or restores.
        seconds: seconds since it began.
        error: the failure with which it ended, else None.
    """

    doing: Literal["save", "restore"]
    path: str
    name: str
    done: int
    total: int
    seconds: float
    error: BaseException | None = None

    @property
    def finished(self) -> bool:
        """Return whether this is the last report of a save or restore that succeeded."""
        return self.done == self.total and self.error is None


Callback = Callable[[Progress], object]


class Meter:
    """Counter of the bytes of one save or restore, if there is a callback, and clock of its phases for the log.

    Threads call `add`. One of them at a time calls the callback, at most five times a second. What it raises is logged,
    ends no save or restore, and is its last call."""

    def __init__(self, progress: Any = None, doing: Literal["save", "restore"] = "save"):
        """Begin to time phases; ``progress`` is the setting. There is no bar where no terminal shows it."""
        self._callback: Callback | None = (bar if is_shown() else None) if progress == BAR else progress
        self.is_on, self._doing = self._callback is not None, doing  # somebody asked for reports
        self._path, self._total = "", 0
        self._start, self._due = 0.0, math.inf  # when it began, and when the next report is due
        self._done = self._counted = 0  # bytes that were reported, and those of all rounds
        self._rounds = 1
        self._turn = threading.Lock()
        self._phases: dict[str, float] = {}  # seconds of each phase, in order
        self._lap = time.monotonic()  # when the last one ended

    def begin(self, path: str, total: Callable[[], int], *, rounds: int = 1) -> None:
        """Begin to count all bytes of a checkpoint, or begin anew; each is added so many times, as files are sent.

        ``total`` is called if somebody asked for reports, or for the line of the log."""
        nbytes = total() if self.is_on or _log.isEnabledFor(logging.INFO) else 0
        if math.isinf(self._due):
            self._start = time.monotonic()
            self._due = self._start + _EVERY_SECONDS
        if (path, nbytes) != (self._path, self._total):
            self._path, self._total, self._done = path, nbytes, 0
        self._counted, self._rounds = 0, rounds

    def add(self, nbytes: int, name: str | Path = "") -> None:
        """Count bytes of a leaf, or of a file, that were read or written."""
        if not self.is_on:
            return
        self._counted += nbytes  # without a lock: of what two threads add at once, the last report tells all
        if time.monotonic() >= self._due and self._turn.acquire(blocking=False):
            try:
                if self._total and time.monotonic() >= self._due:  # else another thread has reported meanwhile
                    # Never less than before, though some is read or written again; all of it is reported at the end.
                    self._done = max(self._done, min(self._counted // self._rounds, self._total - 1))
                    self._call(self._done, name if isinstance(name, str) else show_path(name))
                    self._due = time.monotonic() + _EVERY_SECONDS
            finally:
                self._turn.release()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap, or since this was made, to a phase."""
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._lap
        self._lap = now

    def log(self) -> None:
        """Log what was saved or restored at INFO, with the seconds of each phase."""
        what, size, seconds = f"{self._doing.capitalize()}d", format_size(self._total), sum(self._phases.values())
        phases = ", ".join(f"{phase} {length:.3f}" for phase, length in self._phases.items())
        rate = f", {format_size(self._total / seconds)}/s" if seconds > 0 else ""
        _log.info("%s %s: %s in %.3f s%s (%s)", what, printable(self._path), size, seconds, rate, phases)

    def _call(self, done: int, name: str, error: BaseException | None = None) -> None:
        seconds = time.monotonic() - self._start
        try:
            if self._callback is not None:
                self._callback(Progress(self._doing, self._path, name, done, self._total, seconds, error))
        except Exception as failure:
            if is_of_handler(failure):
                raise
            self._callback = None
            _log.exception("The progress callback of a %s failed, and is not called again", self._doing)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report how the block ended, if it had begun."""
        try:
            yield
        except BaseException as error:
            self._end(self._done, error)
            raise
        self._end(self._total)

    def _end(self, done: int, error: BaseException | None = None) -> None:
        # After an interrupt, a thread may still be in the callback.
        if not math.isinf(self._due) and self._turn.acquire(timeout=_LOCKED_SECONDS):
            try:
                self._call(done, "", error)
            finally:
                self._turn.release()


OFF = Meter()


def is_shown() -> bool:
    """Return whether standard error is a terminal, without which there is no bar."""
    try:
        return sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    except (AttributeError, ValueError, OSError):  # there is none, or one that is closed, or of a program's own
        return False


def bar(report: Progress) -> None:
    """Draw a report as a line of standard error that the next one replaces, and the last one removes."""
    what, part = printable(report.name, one_line=True)[-_NAME_WIDTH:], report.done / max(report.total, 1)
    if report.path:
        what = f"{report.doing[:-1]}ing {printable(os.path.basename(report.path), one_line=True)}  {what:{_NAME_WIDTH}}"
    rate = format_size(report.done / max(report.seconds, 1e-3))
    text = f"{what}  {'#' * int(_BAR_WIDTH * part):.<{_BAR_WIDTH}} {part:4.0%}  {rate}/s"
    width, ends = shutil.get_terminal_size().columns - 1, report.finished or report.error is not None
    with suppress(AttributeError, OSError, ValueError):  # the size of standard output, if this is no descriptor
        width = max(os.get_terminal_size(sys.stderr.fileno()).columns - 1, 0)  # some terminals say 0
    # A name that is wider on the terminal than here, and its bar, may take two lines.
    print(f"\r{'' if ends else text[:width]:{width}}", end="\r", file=sys.stderr, flush=True)
