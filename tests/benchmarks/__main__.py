"""How fast it is: ``python -m tests.benchmarks``, from the checkout.

Restores read from a warm page cache, for every system alike.
"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

from tests.benchmarks import disk, extras, peak, report, rounds, team
from tests.benchmarks.systems import SYSTEMS
from tests.benchmarks.workloads import Workload, workloads

RESULTS = Path(__file__).with_name("RESULTS.md")


def main(arguments: list[str] | None = None) -> None:
    """Runs what was asked for, prints tables, and writes RESULTS.md with ``--write``."""
    options = _options(arguments)
    _be_quiet()
    chosen = [one for one in workloads(quick=options.quick) if not options.only or one.name in options.only]
    tables: list[report.Table] = []

    def show(table: report.Table) -> None:
        table.show()
        tables.append(table)

    with tempfile.TemporaryDirectory(dir=options.workdir) as workdir:
        facts = disk.machine_facts(workdir)
        print("; ".join(f"{name} {fact}" for name, fact in facts.items()))
        for workload in chosen:
            for table in report.tables(workload, rounds.run(workload, options.rounds, workdir, _say)):
                show(table)
        if not options.no_memory:
            show(report.memory_table(_peaks(chosen, workdir, quick=options.quick)))
    if not options.only:
        show(extras.import_table(1 if options.quick else 5))
        show(extras.matching_table((100,) if options.quick else (5000, 50000), 1 if options.quick else 3))
    if options.write:
        others = team.kept(RESULTS.read_text(encoding="utf-8"))
        RESULTS.write_text(_page(facts, options.rounds, tables) + others, encoding="utf-8")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny trees and one round; the times mean nothing")
    parser.add_argument("--rounds", type=int, help="how often each system runs (5)")
    names = [workload.name for workload in workloads(quick=True)]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--workdir", help="where to write checkpoints; decides the file system")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory, a process for each figure")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 5)
    if options.write and (options.quick or options.only):
        parser.error("RESULTS.md holds a whole run: --write goes with neither --quick nor --only")
    return options


def _be_quiet() -> None:
    warnings.simplefilter("ignore")
    # What Orbax and our own library say at each save would drown the tables.
    logging.disable(logging.WARNING)


def _say(progress: str) -> None:
    if sys.stderr.isatty():
        print(progress, file=sys.stderr)


def _peaks(chosen: list[Workload], workdir: str, *, quick: bool) -> dict[tuple[str, str, str], int | None]:
    peaks: dict[tuple[str, str, str], int | None] = {}
    for workload in chosen:
        for operation in peak.OPERATIONS:
            for system in SYSTEMS:
                _say(f"{workload.name}: memory, {operation}, {system.name}")
                figure = peak.above_tree(workload, system, operation, workdir, quick=quick)
                peaks[workload.name, system.name, operation] = figure
    return peaks


def _page(facts: dict[str, str], count: int, tables: list[report.Table]) -> str:
    lines = [
        "# Benchmark results",
        "",
        f"`python -m tests.benchmarks --rounds {count} --write`. Peers are real Flax and Orbax of the versions below,",
        "in the same process and the same rounds. Every restored leaf was compared bit by bit. Restores read from a",
        "warm page cache. *peer* is Flax with the same position of the flag; *raw* is the faster of one and two",
        "threads that write and sync, or read into fresh memory, the same bytes as one file; for *blocked* it is one",
        "copy in memory. *synced* is what the kernel says of the files right after the save returned.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {fact} |" for name, fact in facts.items()),
    ]
    return "\n".join([*lines, *(f"\n{table.markdown()}" for table in tables)]) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
