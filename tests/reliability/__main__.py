"""How reliable it is, beside real Flax: ``python -m tests.reliability``, from the checkout.

The whole takes hours on two cores; ``--scale 0.1`` does a tenth of it, ``--only power`` one experiment.
"""

import argparse
import logging
import os
import sys
import tempfile
import time

from tests.reliability import shim


def main(arguments: list[str] | None = None) -> int:
    """Run experiments and print their table; exit with 1 if ours failed where it promises not to."""
    options = _options(arguments)
    if not shim.why_not() and not shim.is_loaded():
        command = [sys.executable, "-m", "tests.reliability", *(arguments or sys.argv[1:])]
        os.execve(sys.executable, command, shim.environment())
    logging.disable(logging.CRITICAL)
    # The shim decides what is on disk: a real one only costs time.
    tempfile.tempdir = options.workdir
    from tests.reliability.experiments import EXPERIMENTS, WITH_SHIM
    from tests.reliability.tally import Extent, Tally

    failed = False
    for experiment in EXPERIMENTS:
        if options.only and experiment.name not in options.only:
            continue
        if experiment in WITH_SHIM and shim.why_not():
            print(f"{experiment.title}: left out: {shim.why_not()}", file=sys.stderr)
            continue
        print(experiment.title, flush=True)
        for system in experiment.systems:
            if (options.ours and not system.is_ours) or options.system not in (None, system.name):
                continue
            tally, start = Tally(prints=system.is_ours), time.monotonic()
            experiment.run(system, tally, Extent(options.scale))
            print(f"  {system.name:<21} {tally.shown()}; {time.monotonic() - start:.0f} s", flush=True)
            failed = failed or (system.is_ours and tally.wrong > 0)
    return int(failed)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the long form (1)")
    parser.add_argument("--only", action="append", metavar="NAME", help="of tests/reliability/experiments.py")
    parser.add_argument("--ours", action="store_true", help="leave out real Flax")
    parser.add_argument("--system", metavar="NAME", help="one column alone")
    memory = "/dev/shm" if shim.holds_attributes("/dev/shm") else None
    parser.add_argument("--workdir", default=memory, help="where to save; memory is fastest, and no worse")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
