"""How fast ``convert`` is beside a copy of the same files: ``python -m tests.benchmarks.conversion``.

A copy reads every file, writes it, and syncs it, and is compared with nothing; a conversion is compared bit for bit
with its source besides. All read from a warm page cache. CPU time is that of all threads. The goal is 0.7 of the rate
of the fastest copy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import flax_ckpt_compat
from tests.benchmarks import disk
from tests.benchmarks.report import Table
from tests.benchmarks.systems import timed_twice
from tests.support.mixed_checkpoints import save_mixed

_CHECKPOINTS, _THREADS, _PIECE = 20, (1, 2, 4), 8 << 20
_LAYOUTS, _WORKERS = ("orbax", "msgpack", "safetensors"), (1, 2)
_Pair = tuple[float, float]  # seconds by the clock, and of the CPU


def main(arguments: list[str] | None = None) -> None:
    """Runs it and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.conversion", description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="of all checkpoints together (512)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each runs (5)")
    parser.add_argument("--workdir", help="where the checkpoints lie; decides the file system")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.workdir) as workdir:
        print("; ".join(f"{name} {fact}" for name, fact in disk.machine_facts(workdir).items()))
        measure(Path(workdir), options.mib, options.rounds).show()


def measure(workdir: Path, mib: int, rounds: int) -> Table:
    """Seconds of each system, which take turns; the first round, which loads what is loaded once, is left out."""
    source, result = workdir / "source", workdir / "result"
    save_mixed(source, (mib << 20) // _CHECKPOINTS, _CHECKPOINTS, only_arrays=True)
    systems: dict[str, Callable[[], None]] = {
        f"copy, threads: {n}": partial(_copy, source, result, n) for n in _THREADS
    }
    for to in _LAYOUTS:
        for n in _WORKERS:
            systems[f"ours, to {to}, workers: {n}"] = partial(_convert, source, result, to, n)
    found: dict[str, list[_Pair]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        for name, run in systems.items():
            seconds = timed_twice(run)
            shutil.rmtree(result)
            if number:
                found[name].append(seconds)
    best = [
        min(statistics.median(one[at] for one in found[name]) for name in list(systems)[: len(_THREADS)])
        for at in (0, 1)
    ]
    title = f"{_CHECKPOINTS} checkpoints of both formats, {mib} MiB"
    columns = ("system", "median s", "min to max s", "copy ÷ ours", "CPU s", "min to max s", "copy ÷ ours")
    return Table(title, columns, [(name, *_cells(pairs, best)) for name, pairs in found.items()])


def _cells(pairs: list[_Pair], best: list[float]) -> list[str]:
    cells = []
    for values, copy in zip(zip(*pairs, strict=True), best, strict=True):
        median = statistics.median(values)
        cells += [f"{median:.2f}", f"{min(values):.2f} to {max(values):.2f}", f"{copy / max(median, 1e-9):.2f}"]
    return cells


def _copy(source: Path, result: Path, threads: int) -> None:
    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(partial(_copy_file, source, result), [path for path in source.rglob("*") if path.is_file()]))


def _copy_file(source: Path, result: Path, path: Path) -> None:
    to = result / path.relative_to(source)
    to.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as read, to.open("wb") as written:
        shutil.copyfileobj(read, written, _PIECE)
        written.flush()
        os.fsync(written.fileno())


def _convert(source: Path, result: Path, to: str, workers: int) -> None:
    with ThreadPoolExecutor(workers) as executor:
        flax_ckpt_compat.convert(source, result, to, executor=executor)  # type: ignore[arg-type]


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
