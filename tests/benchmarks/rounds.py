"""The timed rounds: every system in turn, each save in a fresh directory, every result compared."""

import contextlib
import gc
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.benchmarks import disk, lineup
from tests.benchmarks.series import Series
from tests.benchmarks.systems import BLOCKED, COLD, COPY, MAPPED, OTHER_MESH, RESTORE_NONE, SAVE, TOUCHED, Raw, timed
from tests.benchmarks.workloads import Tree, Workload, assert_same, same_bytes, workloads

ROOT = Path(__file__).parents[2]
_SMALL_PAGES_BYTES = 64 * 2**20


def run(workload: Workload, rounds: int, workdir: str, say: Callable[[str], None], *, quick: bool) -> Series:
    """Measures one workload, in a process of its own if it needs more devices than there are.

    Args:
        workload: the tree.
        rounds: how many; small leaves get more, and Orbax runs fewer on them.
        workdir: where the fresh directories go.
        say: told about progress.
        quick: whether the workload is one of the quick ones.

    Returns:
        All figures.

    Raises:
        AssertionError: something came back otherwise than it was saved.
        RuntimeError: the process of its own failed; what it wrote is in the message.
    """
    if workload.devices > jax.device_count():
        say(f"{workload.name}: {rounds} rounds in a process of its own")
        return _in_new_process(workload, rounds, workdir, quick=quick)
    _warm_up(workload, workdir)
    bench = _Bench(workload, workdir)
    count = lineup.rounds_of(workload, rounds)
    for number in range(count):
        say(f"{workload.name}: round {number + 1} of {count}")
        for system in lineup.in_turn(workload, number):
            bench.round(system)
        for system in lineup.in_turn(workload, number, background=True):
            bench.background_round(system)
    return bench.series


class _Bench:
    """One workload's trees, and the rounds on them."""

    def __init__(self, workload: Workload, workdir: str) -> None:
        self.series = Series()
        self._workload, self._workdir = workload, workdir
        self._tree, self._target = workload.tree(), workload.target()
        self._other = workload.target(other_mesh=True) if workload.devices > 1 else None
        leaves = (np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(self._tree))
        self._data = np.concatenate(list(leaves))
        self._reserve = _Reserve(3 * workload.nbytes)

    def round(self, system: Any) -> None:
        """Saves, and restores in every way that the lineup names; a system that is raw has bytes for a tree."""
        raw = isinstance(system, Raw)
        gc.collect()
        with tempfile.TemporaryDirectory(dir=self._workdir) as directory:
            saved = self._data if raw else self._tree
            with self._reserve.given_up():
                seconds = timed(lambda: system.save(directory, saved))
            if system not in MAPPED:  # which differ in how they restore only
                self.series.add(system.name, SAVE, seconds)
                self.series.add_unsynced(system.name, disk.unsynced(directory))
            for operation in lineup.restores(self._workload, system):
                if operation != COLD or disk.drop_cache(directory):
                    self._restore(system, operation, directory)
        if raw:
            with self._reserve.given_up():
                self.series.add(system.name, COPY, timed(lambda: np.array(self._data)))

    def background_round(self, system: Any) -> None:
        """Saves in the background; the restore that checks it is not timed."""
        gc.collect()
        with tempfile.TemporaryDirectory(dir=self._workdir) as directory:
            with self._reserve.given_up():
                self.series.add(system.name, BLOCKED, system.save_in_background(directory, self._tree))
            self._check(system, BLOCKED, system.restore(directory, self._target), self._target)

    def _restore(self, system: Any, operation: str, directory: str) -> None:
        target = {RESTORE_NONE: None, OTHER_MESH: self._other}.get(operation, self._target)
        restored: list[Any] = []

        def restore() -> None:
            restored.append(system.restore(directory, target))
            if operation == TOUCHED:
                _touch(restored[0])

        with self._reserve.given_up():
            self.series.add(system.name, operation, timed(restore))
        self._check(system, operation, restored.pop(), target)

    def _check(self, system: Any, operation: str, restored: Any, target: Tree | None) -> None:
        if isinstance(system, Raw):
            assert same_bytes(restored, self._data), f"{system.name}, {operation}: other bytes"
        else:
            placed = target if self._workload.devices > 1 else None
            assert_same(restored, self._tree, f"{system.name}, {operation}", placed)


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
        return np.ones(self._nbytes, np.uint8), _small_pages(_SMALL_PAGES_BYTES)


def _small_pages(nbytes: int) -> Any:
    """Memory in pages of the usual size, each touched."""
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)
    pages[:: mmap.PAGESIZE] = 1
    return pages


def _touch(tree: Any) -> int:
    """Reads a byte of every page, which is when a mapping is filled."""
    step = os.sysconf("SC_PAGE_SIZE")
    arrays = (np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(tree))
    return sum(int(array[::step].sum()) for array in arrays)


def _warm_up(workload: Workload, workdir: str) -> None:
    """Loads and compiles what each system loads at its first call, untimed."""
    (small,) = [one for one in workloads(quick=True) if one.name == workload.name]
    bench = _Bench(small, workdir)
    for system in lineup.in_turn(small, 0):
        bench.round(system)
    for system in lineup.in_turn(small, 0, background=True):
        bench.background_round(system)


def _in_new_process(workload: Workload, rounds: int, workdir: str, *, quick: bool) -> Series:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={workload.devices}".strip()
    arguments = [workload.name, str(rounds), workdir, "quick" if quick else "full"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.rounds", *arguments],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{workload.name}, measured in a process of its own, failed:\n{done.stderr}")
    return Series.of(json.loads(done.stdout.rpartition("SERIES ")[2]))


def main(arguments: list[str]) -> None:
    """The process of its own: measures, prints ``SERIES`` and the entries of results.json."""
    name, rounds, workdir, size = arguments
    quick = size == "quick"
    (workload,) = [one for one in workloads(quick=quick) if one.name == name]
    series = run(workload, int(rounds), workdir, lambda progress: print(progress, file=sys.stderr), quick=quick)
    print(f"SERIES {json.dumps(series.entries(name))}")


if __name__ == "__main__":
    main(sys.argv[1:])
