"""What saves and restores as `flax.training.checkpoints` does, ours and Flax's own, and the bare file system."""

import dataclasses
import itertools
import logging
import os
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import flax
import jax
import numpy as np
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import checkpoints as our_checkpoints

SAVE, RESTORE = "save", "restore"
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_AT_ONCE = 2**24  # bytes per write or read of the raw systems


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """`flax.training.checkpoints`, ours or Flax's own, with the flag in one position.

    Attributes:
        name: for the tables.
        module: the module with the functions.
        orbax: the position of ``flax_use_orbax_checkpointing``.
    """

    name: str
    module: types.ModuleType
    orbax: bool

    def save(self, directory: str, tree: Any) -> None:
        """Saves step 0 and waits until it is committed."""
        flax.config.update("flax_use_orbax_checkpointing", self.orbax)
        self.module.save_checkpoint(directory, tree, 0)

    def restore(self, directory: str, target: Any) -> Any:
        """Restores step 0 and waits for devices."""
        flax.config.update("flax_use_orbax_checkpointing", self.orbax)
        return jax.block_until_ready(self.module.restore_checkpoint(directory, target))


@dataclasses.dataclass(frozen=True)
class Raw:
    """The same bytes as one file: written and synced, and read into fresh memory.

    Attributes:
        threads: how many write or read at once, each its own part of the file.
    """

    threads: int

    @property
    def name(self) -> str:
        """For the tables."""
        return f"raw, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def save(self, directory: str, tree: Bytes) -> None:
        """Writes and syncs a file and its directory."""
        with open(os.path.join(directory, "raw"), "xb", buffering=0) as file:
            self._each_part(memoryview(tree), lambda part, start: os.pwrite(file.fileno(), part, start))
            os.fsync(file)
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def restore(self, directory: str, target: Any) -> Bytes:
        """Reads a file into memory that no one has touched yet; a target says nothing to it."""
        with open(os.path.join(directory, "raw"), "rb", buffering=0) as file:
            data = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
            self._each_part(memoryview(data), lambda part, start: os.preadv(file.fileno(), [part], start))
        return data

    def _each_part(self, data: memoryview, move: Callable[[memoryview, int], int]) -> None:
        def run(start: int, stop: int) -> None:
            while start < stop:
                start += move(data[start : min(stop, start + _AT_ONCE)], start)

        bounds = [len(data) * number // self.threads for number in range(self.threads + 1)]
        workers = [threading.Thread(target=run, args=part) for part in itertools.pairwise(bounds[1:])]
        for worker in workers:
            worker.start()
        run(*bounds[:2])
        for worker in workers:
            worker.join()


OURS = (
    Checkpoints("ours, msgpack", our_checkpoints, False),
    Checkpoints("ours, orbax format", our_checkpoints, True),
)
FLAX = (
    Checkpoints("flax, msgpack", flax_checkpoints, False),
    Checkpoints("flax on orbax", flax_checkpoints, True),
)
RAW = (Raw(1), Raw(max(2, os.cpu_count() or 2)))


def timed(call: Callable[[], Any]) -> float:
    """Seconds that a call took."""
    return timed_twice(call)[0]


def timed_twice(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that a call took, by the clock and of the processor in all threads."""
    clock, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - clock, time.process_time() - cpu


def be_quiet() -> None:
    """Silences what Orbax and our own library say at each save, which would drown the tables."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
