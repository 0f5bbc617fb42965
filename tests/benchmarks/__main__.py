"""How fast it is: ``python -m tests.benchmarks``, from the checkout.

Restores read from a warm page cache, but for the rows that say cold, for every system alike.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile

from tests.benchmarks import disk, peak, report, results, rounds, sections, systems
from tests.benchmarks.sections import DATA, RESULTS
from tests.benchmarks.series import Entry, Series
from tests.benchmarks.workloads import Workload, workloads


@dataclasses.dataclass
class _Run:
    """All that one run measured.

    Attributes:
        facts: of the machine.
        measured: the workloads with their figures.
        peaks: of memory.
        tables: all that was shown, in order.
    """

    facts: dict[str, str]
    measured: list[tuple[Workload, Series]] = dataclasses.field(default_factory=list)
    peaks: list[Entry] = dataclasses.field(default_factory=list)
    tables: list[report.Table] = dataclasses.field(default_factory=list)

    def show(self, table: report.Table) -> None:
        """Prints a table and keeps it."""
        table.show()
        self.tables.append(table)


def main(arguments: list[str] | None = None) -> None:
    """Runs what was asked for, prints tables, and with ``--write`` writes RESULTS.md and results.json."""
    options = _options(arguments)
    systems.be_quiet()
    with tempfile.TemporaryDirectory(dir=options.workdir) as workdir:
        run = _measure(options, workdir)
    if options.write:
        data = results.collect(run.facts, run.measured, run.peaks)
        data["losses"] = json.loads(DATA.read_text(encoding="utf-8")).get("losses", [])  # `training_loop` writes them
        DATA.write_text(results.as_text(data), encoding="utf-8")
        others = sections.kept(RESULTS.read_text(encoding="utf-8"))
        page = results.page(run.facts, options.rounds, run.tables)
        RESULTS.write_text(page + others, encoding="utf-8")


def _measure(options: argparse.Namespace, workdir: str) -> _Run:
    run = _Run(disk.machine_facts(workdir))
    print("; ".join(f"{name} {fact}" for name, fact in run.facts.items()))
    chosen = [one for one in workloads(quick=options.quick) if not options.only or one.name in options.only]
    for workload in chosen:
        series = rounds.run(workload, options.rounds, workdir, _say, quick=options.quick)
        run.measured.append((workload, series))
        for table in report.tables(workload, series):
            run.show(table)
    if not options.no_memory:
        run.peaks = peak.peaks(chosen, workdir, _say, quick=options.quick)
        run.show(report.memory_table(run.peaks))
    return run


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny trees and one round; the times mean nothing")
    parser.add_argument("--rounds", type=int, help="how often each system runs (5)")
    names = [workload.name for workload in workloads(quick=True)]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--workdir", help="where to write checkpoints; decides the file system")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory, a process for each figure")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} and {DATA.name}")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 5)
    if options.write and (options.quick or options.only):
        parser.error("RESULTS.md holds a whole run: --write goes with neither --quick nor --only")
    return options


def _say(progress: str) -> None:
    if sys.stderr.isatty():
        print(progress, file=sys.stderr)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
