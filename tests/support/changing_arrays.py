"""Arrays that another thread of the program writes to while they are saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def counting(array: np.ndarray[Any, Any]) -> Iterator[None]:
    """Let a thread write growing numbers to all of an array."""
    ended = threading.Event()

    def count() -> None:
        while not ended.is_set():
            np.add(array, 1, out=array)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
