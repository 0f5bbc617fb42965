"""Tell what a program's signal handlers raise from the errors of what they interrupt."""

from __future__ import annotations

import signal
import traceback
from typing import Any


def is_of_handler(error: BaseException) -> bool:
    """Return whether an exception passed through a signal handler of the program.

    Programs bound a call by a handler that raises TimeoutError, an OSError: it must reach them, and is not tried again.
    """
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return bool(codes) and any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> Any:
    handler = getattr(handler, "func", handler)  # of functools.partial
    if not hasattr(handler, "__code__") and callable(handler):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)
