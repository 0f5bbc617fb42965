"""Wait for requests that share the network with others of this process.

Each request may take some seconds and the time that its bytes take at the slowest rate. Where many are under way,
together they take the time of all their bytes: 16 of 64 MiB at 10 MiB/s end after 102 s, and none of them before.
TensorStore goes on sending what is cancelled (0.1.86, measured), so sending all of it again would never end.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from flax_ckpt_compat._core.signal_handler_errors import is_of_handler


class _Ended(NamedTuple):
    """A request that was answered."""

    nbytes: int
    began: float
    ended: float


_MANY = 1000
_running: dict[object, int] = {}  # bytes of each request
_ended: list[_Ended] = []  # while others are running


class SlowNetworkError(TimeoutError):
    """All requests under way did not end in the time of all their bytes; to send one of them again would not help."""


def wait(future: Any, nbytes: int, seconds: float, rate: float) -> Any:
    """Return the result of a request of so many bytes; raise TimeoutError if it does not answer in time.

    It has ``seconds``, and the time of its bytes at ``rate``. Beside others it has the time of all bytes under way,
    counted from when one of them ended last, until one of as many bytes has ended that began ``seconds`` later: then
    it is this one that hangs."""
    key, began, timeout = object(), time.monotonic(), seconds + nbytes / rate
    _running[key] = nbytes
    try:
        while True:
            try:
                found = future.result(timeout=timeout)
            except TimeoutError as error:
                ended, total = list(_ended), sum(list(_running.values()))
                overtaken = any(other.began > began + seconds and other.nbytes >= nbytes for other in ended)
                if not nbytes or overtaken or is_of_handler(error):
                    raise
                since = max([began, *(other.ended for other in ended)])
                timeout = min(seconds, since + seconds + total / rate - time.monotonic())
                if timeout <= 0 and total > nbytes:
                    raise SlowNetworkError from error
                if timeout <= 0:
                    raise
            else:
                _ended.append(_Ended(nbytes, began, time.monotonic()))
                return found
    finally:
        del _running[key]
        if not _running or len(_ended) > _MANY:
            _ended.clear()
