"""Random cases for a given time: ``python -m tests.random_cases --seconds 600``; ``--seed`` draws the same again."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import time
import traceback
import warnings

from tests.random_cases.kinds import KINDS


def main() -> int:
    """Run rounds of all kinds until the time is over; the number of failures is told, and is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_cases", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="stop after this time; a round is ended")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="of the first round")
    parser.add_argument("--only", choices=[kind.name for kind in KINDS], help="one kind alone")
    parser.add_argument("--examples", type=int, default=50, help="cases of a kind in a round")
    options = parser.parse_args()
    logging.getLogger("flax_ckpt_compat").setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    kinds = [kind for kind in KINDS if options.only in (None, kind.name)]
    end, number, failures = time.monotonic() + options.seconds, options.seed, 0
    while number == options.seed or time.monotonic() < end:
        for kind in kinds:
            try:
                kind.run(number, options.examples)
            except Exception:
                failures += 1
                traceback.print_exc()
                print(f"FAILED: python -m tests.random_cases --only {kind.name} --seed {number} --seconds 0")
        number += 1
    count = f"{number - options.seed} rounds of {options.examples} cases of {len(kinds)} kinds"
    print(f"seed {options.seed}: {count}, {failures} failures")
    return min(failures, 100)


if __name__ == "__main__":
    sys.exit(main())
