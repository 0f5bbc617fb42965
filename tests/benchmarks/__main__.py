"""How fast it is: ``python -m tests.benchmarks``, from the checkout.

Restores read from a warm page cache, for every system alike.
"""

import argparse
import json
import os
import sys
import tempfile

from tests.benchmarks import disk, report, rounds, systems
from tests.benchmarks.workloads import workloads


def main(arguments: list[str] | None = None) -> None:
    """Runs what was asked for, prints tables, and with ``--write`` writes RESULTS.md, results.json and README."""
    options = _options(arguments)
    systems.be_quiet()
    with tempfile.TemporaryDirectory(dir=options.workdir) as workdir:
        results = _measure(options, workdir)
    if options.write:
        # `training_loop` writes these.
        report.write({**results, "losses": json.loads(report.DATA.read_text(encoding="utf-8"))["losses"]})


def _measure(options: argparse.Namespace, workdir: str) -> report.Results:
    facts = disk.machine_facts(workdir)
    print("; ".join(f"{name} {fact}" for name, fact in facts.items()))
    results: report.Results = {"machine": facts, "workloads": {}, "seconds": []}
    chosen = [one for one in workloads(quick=options.quick) if not options.only or one.name in options.only]
    for workload in chosen:
        series = rounds.run(workload, options.rounds, workdir, _say)
        about = {"title": workload.summary, "nbytes": workload.nbytes, "leaves": workload.leaves}
        results["workloads"][workload.name] = about
        results["seconds"] += series.entries.values()
        for table in report.tables(workload.name, workload.summary, series):
            print(f"\n{table.markdown()}")
    return results


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny trees and one round; the times mean nothing")
    parser.add_argument("--rounds", type=int, help="how often each system runs (5)")
    names = [workload.name for workload in workloads(quick=True)]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--workdir", help="where to write checkpoints; decides the file system")
    parser.add_argument("--write", action="store_true", help="write RESULTS.md, results.json and README's table")
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
