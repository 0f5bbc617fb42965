"""Show the progress of a command that takes long, as a bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flax_ckpt_compat._core import progress_bar
from flax_ckpt_compat._view.stored_leaves import Begin, Count, uncounted

from ._command_base import is_terminal


@contextmanager
def progress_shown(*, as_json: bool) -> Iterator[Begin]:
    """Yield what begins a bar.

    It is shown where both streams are a terminal, above which results are printed meanwhile; else it counts nothing."""
    if as_json or not (is_terminal(sys.stdout) and progress_bar.is_shown()):
        yield uncounted
        return
    with progress_bar.display() as display:

        def begin(total: Callable[[], int]) -> Count:
            task = display.add_task("", total=total())
            return lambda nbytes: display.advance(task, nbytes)

        yield begin
