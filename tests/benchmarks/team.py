"""How fast several processes save together: ``python -m tests.benchmarks.team``, from the checkout.

A time is that from the first process's call to the last one's return. Restores read from a warm page cache.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

from tests.benchmarks import disk, sections, team_jobs
from tests.benchmarks.report import Table
from tests.benchmarks.sections import RESULTS
from tests.benchmarks.team_jobs import OTHER, SAME, SYSTEMS, Sizes
from tests.support.team import Team

SECTION = "## Many processes"
_OPERATIONS = {"save": "save", SAME: "restore, same mesh", OTHER: "restore, another mesh"}
# One save of the small leaves takes the peers this long.
_SLOW_ROUNDS = 3
_LIMIT = 900


def main(arguments: list[str] | None = None) -> None:
    """Runs it, prints tables, and writes its section of RESULTS.md with ``--write``."""
    options = _options(arguments)
    large = Sizes(options.arrays, (1024, max(8, options.bytes // options.arrays // 4096)))
    small = Sizes(20 if options.quick else options.leaves, (16, 8))
    tables: list[Table] = []
    with tempfile.TemporaryDirectory(dir=options.workdir) as workdir:
        facts = disk.machine_facts(workdir)
        team = Team(options.processes, options.devices)
        try:
            measure(team, Sizes(2, (16, 8)), 1, workdir)  # loads what each system loads at its first call
            for sizes, rounds in ((large, options.rounds), (small, min(options.rounds, _SLOW_ROUNDS))):
                tables += measure(team, sizes, rounds, workdir)
                for table in tables[-len(_OPERATIONS) :]:
                    table.show()
        finally:
            team.close()
    if options.write:
        said = "; ".join(f"{name} {fact}" for name, fact in facts.items())
        text = [*_head(options), "", said + ".", *(f"\n{table.markdown()}" for table in tables)]
        page = RESULTS.read_text(encoding="utf-8")
        RESULTS.write_text(sections.with_section(page, SECTION, "\n".join(text)), encoding="utf-8")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.team", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny trees and one round; the times mean nothing")
    parser.add_argument("--rounds", type=int, help="how often each system runs (5)")
    parser.add_argument("--bytes", type=int, help="of all large arrays together (1 GiB)")
    parser.add_argument("--arrays", type=int, default=32, help="number of large arrays (32)")
    parser.add_argument("--leaves", type=int, default=5_000, help="number of small arrays (5000)")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2, help="of each process")
    parser.add_argument("--workdir", help="where to write checkpoints; decides the file system")
    parser.add_argument("--write", action="store_true", help=f"write the section of {RESULTS.name}")
    options = parser.parse_args(arguments)
    if options.write and options.quick:
        parser.error("RESULTS.md holds a whole run: --write does not go with --quick")
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.bytes = options.bytes or (2**20 if options.quick else 2**30)
    return options


def _head(options: argparse.Namespace) -> list[str]:
    return [
        f"`python -m tests.benchmarks.team --rounds {options.rounds} --write`: {options.processes} processes of "
        f"{options.devices} devices each on one machine,",
        "every array split over all devices. Peers are real Orbax (`PyTreeCheckpointer`) and real Flax with",
        "`GlobalAsyncCheckpointManager`, in the same processes and the same rounds, in an order of each round's own. A "
        "time is that",
        "from the first process's call to the last one's return, with all waits. Every restored shard was compared bit",
        f"by bit. The small leaves ran {min(options.rounds, _SLOW_ROUNDS)} rounds. *on disk* is what the files hold: "
        "the peers compress, and we do not unless asked",
        "(but always in `_gda` folders, as Flax). *synced* is what the kernel says of the files right after the save.",
    ]


class _Series:
    """Figures of one tree.

    Attributes:
        seconds: (system, operation) → seconds of each round.
        unsynced: system → the most bytes that were not on the disk when a save returned, or None if unknown.
        on_disk: system → bytes of all files.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self.unsynced: dict[str, int | None] = {}
        self.on_disk: dict[str, int] = {}

    def add(self, system: str, operation: str, spans: list[tuple[float, float]]) -> None:
        seconds = max(ended for _, ended in spans) - min(began for began, _ in spans)
        self.seconds.setdefault((system, operation), []).append(seconds)

    def look(self, system: str, folder: str) -> None:
        dirty, before = disk.unsynced(folder), self.unsynced.get(system, 0)
        self.unsynced[system] = None if dirty is None or before is None else max(dirty, before)
        self.on_disk[system] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def measure(team: Team, sizes: Sizes, rounds: int, workdir: str) -> list[Table]:
    """Times all systems on one tree; a table for each operation.

    Raises:
        AssertionError: something came back otherwise than it was saved.
    """
    series = _Series()
    for number in range(rounds):
        order = list(range(len(SYSTEMS)))
        random.Random(number).shuffle(order)
        _one_of_each(team, series, sizes, workdir, order)
    title = f"{sizes.number} arrays, {sizes.nbytes / 1e6:.1f} MB"
    return [_table(series, operation, f"{shown} ({title})") for operation, shown in _OPERATIONS.items()]


def _one_of_each(team: Team, series: _Series, sizes: Sizes, workdir: str, order: list[int]) -> None:
    for system in order:
        name = SYSTEMS[system].name
        os.sync()
        print(f"{name}, {sizes.number} arrays", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=workdir) as folder:
            series.add(name, "save", team.call(team_jobs.save, folder, system, sizes, timeout=_LIMIT))
            series.look(name, folder)
            for kind in (SAME, OTHER):
                spans = team.call(team_jobs.restore, folder, system, sizes, kind, timeout=_LIMIT)
                series.add(name, kind, spans)


def _table(series: _Series, operation: str, title: str) -> Table:
    medians = {name: statistics.median(found) for (name, kind), found in series.seconds.items() if kind == operation}
    rows = []
    for system in SYSTEMS:
        seconds = series.seconds[system.name, operation]
        ratio = f"{medians[system.peer] / medians[system.name]:.2f}" if system.peer else ""
        row = (system.name, f"{medians[system.name]:.3f}", f"{min(seconds):.3f} to {max(seconds):.3f}", ratio)
        rows.append((*row, *_of_save(series, system.name)) if operation == "save" else row)
    columns = ("system", "median s", "min to max s", "peer ÷ ours")
    return Table(title, (*columns, "on disk", "synced") if operation == "save" else columns, rows)


def _of_save(series: _Series, system: str) -> tuple[str, str]:
    dirty = series.unsynced[system]
    on_disk = f"{series.on_disk[system] / 1e6:.1f} MB"
    if dirty is None:
        return on_disk, "unknown"
    return on_disk, "yes" if dirty == 0 else f"no, {dirty / 1e6:.3g} MB only in memory"


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
