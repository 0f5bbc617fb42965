"""Show the progress of saves and restores as bars on a terminal, one for each that runs."""

from __future__ import annotations

import collections
import functools
import logging
import os
import sys
import threading
from typing import Any

from flax_ckpt_compat._core.errors import is_of_handler
from flax_ckpt_compat._core.progress import Callback, Progress
from flax_ckpt_compat._core.text_formatting import printable

_log = logging.getLogger("flax_ckpt_compat")
BAR = "bar"
_NAME_WIDTH = 32
_LOCKED_SECONDS = 1.0


def callback_of(setting: Any) -> Callback | None:
    """Return the callback that a value of the setting ``progress`` means; no bar where no terminal shows it."""
    if setting != BAR:
        return setting  # type: ignore[no-any-return]
    return _bars() if is_shown() else None


def is_shown() -> bool:
    """Return whether standard error is a terminal that takes escape sequences, without which there is no bar."""
    try:
        return sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    except (AttributeError, ValueError, OSError):  # there is none, or one that is closed, or of a program's own
        return False


def display(**options: Any) -> Any:
    """Return rich's display of bars of bytes on standard error, which vanishes when it stops.

    ``options`` are those of ``rich.progress.Progress``."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Display

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Display(*columns, console=Console(stderr=True), transient=True, **options)


@functools.cache
def _bars() -> _Bars:
    return _Bars()


class _Bars:
    """The bars of this process; they are drawn while a save or restore runs.

    The first failure to draw, such as that of a terminal that is gone, ends them: no save or restore fails with it."""

    def __init__(self) -> None:
        # Saves in the background report beside restores. A signal handler that saves may have interrupted one of these
        # within a report, so that nobody waits for another for long.
        self._lock = threading.RLock()
        self._display: Any = None
        self._is_broken = False
        self._tasks: dict[tuple[str, str], Any] = {}
        self._ended = collections.deque[tuple[str, str]]()  # those whose bars are to go

    def __call__(self, report: Progress) -> None:
        """Show a report; what ends before its first report has no bar."""
        key, ends = (report.doing, report.path), report.finished or report.error is not None
        if ends:
            self._ended.append(key)
        if self._is_broken or not self._lock.acquire(timeout=_LOCKED_SECONDS):
            return
        try:
            if not ends:
                self._show(key, report)
            while self._ended:
                self._end(self._ended.popleft())
        except Exception as error:
            if is_of_handler(error):
                raise
            self._is_broken = True
            _log.warning("Progress is not shown any more: %r", error)
        finally:
            self._lock.release()

    def _show(self, key: tuple[str, str], report: Progress) -> None:
        if self._display is None:
            # Drawn by each report: a thread of its own would go on after a fork. The program's streams stay its own.
            self._display = display(auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._display.start()
        if key not in self._tasks:
            self._tasks[key] = self._display.add_task("")
        shown = f"{report.doing[:-1]}ing {os.path.basename(report.path)}  {_shortened(report.name)}"
        self._display.update(self._tasks[key], description=shown, completed=report.done, total=report.total)
        self._display.refresh()

    def _end(self, key: tuple[str, str]) -> None:
        if key not in self._tasks:
            return
        self._display.remove_task(self._tasks.pop(key))
        if not self._tasks:
            self._display.stop()
            self._display = None


def _shortened(name: str) -> str:
    """Return the end of a name, padded: the bars stay where they are."""
    name = printable(name, one_line=True)
    return (name if len(name) <= _NAME_WIDTH else "…" + name[1 - _NAME_WIDTH :]).ljust(_NAME_WIDTH)
