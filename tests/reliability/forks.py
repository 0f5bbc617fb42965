"""Run functions in forks of this process, which has imported everything and started no thread."""

import contextlib
import dataclasses
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a fork ended."""

    value: Any = None  # what the function returned
    error: str = ""  # the traceback of what it raised; empty if nothing
    code: int = 0  # its exit code, negative for a signal
    hung: bool = False  # it was killed because it took too long


def run(function: Callable[[], Any], timeout: float = 600.0) -> Ended:
    """Call a function in a fork, and return how that ended.

    Args:
        function: returns what can be pickled.
        timeout: seconds after which the fork counts as hung.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _work(function, writer)
    os.close(writer)
    answer, hung, end = b"", False, time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        if not select.select([reader], [], [], max(0.0, left))[0]:
            hung = True
            os.kill(child, signal.SIGKILL)
            end += 10.0
            continue
        piece = os.read(reader, 1 << 20)
        if not piece:
            break
        answer += piece
    os.close(reader)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    value, error = pickle.loads(answer) if code == 0 and answer else (None, "")
    return Ended(value, error, code, hung)


def _work(function: Callable[[], Any], writer: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what is injected makes libraries say much
    try:
        # A library's background thread must not keep the fork alive, nor its output disturb the table.
        answer = pickle.dumps((function(), ""))
    except BaseException:
        answer = pickle.dumps((None, traceback.format_exc()[-3000:]))
    while answer:
        answer = answer[os.write(writer, answer) :]
    os._exit(0)


@contextlib.contextmanager
def running(*functions: Callable[[], Any]) -> Iterator[list[int]]:
    """Call functions in forks of their own, which are killed at the end; yields their process ids."""
    children = []
    for function in functions:
        child = os.fork()
        if not child:
            _work(function, os.open(os.devnull, os.O_WRONLY))
        children.append(child)
    try:
        yield children
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
