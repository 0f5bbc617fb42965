"""The rounds of the benchmark, and who runs on which workload. Saves go to fresh directories; results are compared."""

import contextlib
import gc
import mmap
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from tests.benchmarks import disk, peers
from tests.benchmarks.systems import FLAX, OURS, RAW, RESTORE, SAVE, Raw, timed
from tests.benchmarks.workloads import Workload, workloads
from tests.support.layouts import assert_same

# An entry of results.json: workload, operation, system, seconds (of each round), unsynced (bytes, of saves; None
# where the kernel does not say).
Entry = dict[str, Any]
ORBAX = (FLAX[1], peers.PYTREE, peers.STANDARD, *peers.V1)
SYSTEMS: dict[str, tuple[Any, ...]] = {
    "gpt2-jax": (*OURS, FLAX[0], *ORBAX, *RAW),
    "gpt2-numpy": (*OURS, *FLAX, *RAW),
    # Flax with the flag on is PyTreeCheckpointer with little around it: one of them will do where a save takes long.
    "gpt2+adamw": (*OURS, *FLAX, peers.STANDARD, *peers.V1, *RAW),
    "leaves-jax": (*OURS, FLAX[0], *ORBAX, *RAW),
}
# What takes hundredths of a second is measured more often, or the minutes in which a host is slow decide who is faster;
# one save of the small leaves takes Orbax seconds.
SMALL_REPEATS, SLOW_ROUNDS = 10, 3
_SMALL_PAGES_BYTES = 64 * 2**20


class Series:
    """Everything measured on one workload, as entries of results.json, by (system, operation)."""

    def __init__(self, workload: str, entries: Iterable[Entry] = ()) -> None:
        self.workload = workload
        self.entries = {(entry["system"], entry["operation"]): entry for entry in entries}

    def add(self, system: str, operation: str, seconds: float, unsynced: int | None = None) -> None:
        """Notes one round; of all rounds, the most bytes that were not on the disk when a save returned."""
        about = {"workload": self.workload, "operation": operation, "system": system}
        entry = self.entries.setdefault((system, operation), {**about, "seconds": [], "unsynced": unsynced})
        entry["seconds"].append(round(seconds, 6))
        known = (entry["unsynced"], unsynced)
        entry["unsynced"] = None if None in known else max(known)

    def ratio(self, operation: str, system: str, other: str) -> float | None:
        """How many times the other's time a system took, or None where one was not measured.

        The host of a virtual machine may slow down by half from one second to the next, so systems that ran in every
        round are compared within each, and the median of those ratios counts. Otherwise it is the ratio of medians.
        """
        if (system, operation) not in self.entries or (other, operation) not in self.entries:
            return None
        ours, theirs = (self.entries[name, operation]["seconds"] for name in (system, other))
        if len(ours) == len(theirs):
            return statistics.median(one / beside for one, beside in zip(ours, theirs, strict=True))
        return statistics.median(ours) / statistics.median(theirs)

    def fastest(self, systems: list[str], operation: str) -> tuple[float, str] | None:
        """Least median of some systems and whose it is, or None where none was measured."""
        measured = [one for one in systems if (one, operation) in self.entries]
        found = [(statistics.median(self.entries[one, operation]["seconds"]), one) for one in measured]
        return min(found, default=None)


def run(workload: Workload, rounds: int, workdir: str, say: Callable[[str], None]) -> Series:
    """Measures one workload.

    Args:
        workload: the tree.
        rounds: how many; small leaves get more, and Orbax runs fewer on them.
        workdir: where the fresh directories go.
        say: told about progress.

    Raises:
        AssertionError: something came back otherwise than it was saved.
    """
    (small,) = [one for one in workloads(quick=True) if one.name == workload.name]
    _Bench(small, workdir).round(0)  # loads and compiles what each system does at its first call
    bench = _Bench(workload, workdir)
    count = rounds * SMALL_REPEATS if workload.kind == "small" else rounds
    for number in range(count):
        say(f"{workload.name}: round {number + 1} of {count}")
        bench.round(number)
    return bench.series


class _Bench:
    """One workload's trees, and the rounds on them."""

    def __init__(self, workload: Workload, workdir: str) -> None:
        self.series = Series(workload.name)
        self._workload, self._workdir = workload, workdir
        self._tree, self._target = workload.tree(), workload.target()
        leaves = (np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(self._tree))
        self._data = np.concatenate(list(leaves))
        self._reserve = _Reserve(3 * workload.nbytes)

    def round(self, number: int) -> None:
        """Runs the systems in an order of this round's own, so that nobody always follows the same one."""
        chance, small = random.Random(number), self._workload.kind == "small"
        slow_ones_run = not small or number in range(0, SLOW_ROUNDS * SMALL_REPEATS, SMALL_REPEATS)
        chosen = list(SYSTEMS[self._workload.name])
        chance.shuffle(chosen)
        for system in chosen:
            if slow_ones_run or system not in ORBAX:
                gc.collect()
                with tempfile.TemporaryDirectory(dir=self._workdir) as directory:
                    self._save_and_restore(system, directory)

    def _save_and_restore(self, system: Any, directory: str) -> None:
        """A system that is raw has bytes for a tree."""
        saved, restored = self._data if isinstance(system, Raw) else self._tree, list[Any]()
        with self._reserve.given_up():
            seconds = timed(lambda: system.save(directory, saved))
        self.series.add(system.name, SAVE, seconds, disk.unsynced(directory))
        with self._reserve.given_up():
            seconds = timed(lambda: restored.append(system.restore(directory, self._target)))
        self.series.add(system.name, RESTORE, seconds)
        assert_same(restored.pop(), saved, f"{system.name}, {RESTORE}")


class _Reserve:
    """Memory that is held while nothing is timed, so that all systems find as much of it at hand.

    A virtual machine gets memory from its host when it first touches it, which costs several times what the kernel's
    own zeroing does, and gives back what is free for some seconds: without this it would be up to who comes first.
    What thousands of small objects lie in comes page by page, and from others than large arrays do: where those pages
    had to come from the host, they took a third of the time of restoring 5,000 leaves.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._held: Any = self._take()

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """For one timed call: no unwritten pages, and the memory free."""
        os.sync()
        self._held = None
        yield
        self._held = self._take()

    def _take(self) -> Any:
        """Memory in large pages, and in pages of the usual size, each touched."""
        memory = mmap.mmap(-1, _SMALL_PAGES_BYTES)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        pages = np.frombuffer(memory, np.uint8)
        pages[:: mmap.PAGESIZE] = 1
        return np.ones(self._nbytes, np.uint8), pages
