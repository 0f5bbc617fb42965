"""What is compared: our two formats, Flax's two backends, and the bare file system."""

import dataclasses
import itertools
import os
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import flax
import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import checkpoints as our_checkpoints

SAVE, RESTORE, RESTORE_NONE, BLOCKED, COPY = "save", "restore", "restore, target None", "async save: blocked", "copy"
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

    @property
    def ours(self) -> bool:
        """Whether the functions are ours."""
        return self.module is our_checkpoints

    def save(self, directory: str, tree: Any) -> None:
        """Saves step 0 and waits until it is committed."""
        flax.config.update("flax_use_orbax_checkpointing", self.orbax)
        self.module.save_checkpoint(directory, tree, 0)

    def restore(self, directory: str, target: Any) -> Any:
        """Restores step 0 and waits for devices."""
        flax.config.update("flax_use_orbax_checkpointing", self.orbax)
        return jax.block_until_ready(self.module.restore_checkpoint(directory, target))

    def save_in_background(self, directory: str, tree: Any) -> float:
        """Saves step 0 in the background.

        Returns:
            Seconds until the caller could go on; the save itself has ended when this returns.
        """
        flax.config.update("flax_use_orbax_checkpointing", self.orbax)
        if self.orbax and not self.ours:
            # Flax ignores async_manager here; this is the way that its documentation shows.
            checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
            seconds = timed(lambda: self.module.save_checkpoint(directory, tree, 0, orbax_checkpointer=checkpointer))
            checkpointer.close()
            return seconds
        manager = self.module.AsyncManager()
        seconds = timed(lambda: self.module.save_checkpoint(directory, tree, 0, async_manager=manager))
        manager.wait_previous_save()
        return seconds


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

    def save(self, path: str, data: memoryview) -> None:
        """Writes and syncs a file and its directory."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self._each_part(data, lambda part, start: os.pwrite(descriptor, part, start))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        directory = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def restore(self, path: str) -> memoryview:
        """Reads a file into memory that no one has touched yet."""
        data = memoryview(np.empty(os.path.getsize(path), np.uint8))
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self._each_part(data, lambda part, start: os.preadv(descriptor, [part], start))
        finally:
            os.close(descriptor)
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


SYSTEMS = (
    Checkpoints("ours, msgpack", our_checkpoints, False),
    Checkpoints("ours, orbax format", our_checkpoints, True),
    Checkpoints("flax, msgpack", flax_checkpoints, False),
    Checkpoints("flax on orbax", flax_checkpoints, True),
)
RAW = (Raw(1), Raw(2))


def peer_of(system: str) -> str:
    """The system of Flax that one of ours replaces."""
    return {"ours, msgpack": "flax, msgpack", "ours, orbax format": "flax on orbax"}[system]


def timed(call: Callable[[], Any]) -> float:
    """Seconds that a call took."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
