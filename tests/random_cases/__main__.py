"""Random cases for a given time: ``python -m tests.random_cases --seconds 600``; ``--seed`` draws the same again."""

import argparse
import itertools
import logging
import secrets
import sys
import time
import traceback
import warnings

from tests.random_cases.kinds import KINDS


def main() -> int:
    """Run rounds of all kinds until the time is over; exit with the number of failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_cases", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=300, help="begin no kind of cases after this time; 0: one round of all kinds"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="of the first round")
    parser.add_argument("--only", choices=[kind.name for kind in KINDS], help="one kind alone")
    parser.add_argument("--examples", type=int, default=50, help="cases of a kind in a round")
    options = parser.parse_args()
    logging.getLogger("flax_ckpt_compat").setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    kinds = [kind for kind in KINDS if options.only in (None, kind.name)]
    end, cases, failures = time.monotonic() + options.seconds, 0, 0
    # Not itertools.product, which collects its arguments first.
    for number, kind in ((number, kind) for number in itertools.count(options.seed) for kind in kinds):
        if cases and time.monotonic() > end and (options.seconds or number > options.seed):
            break
        cases += options.examples
        try:
            kind.run(number, options.examples)
        except Exception:
            failures += 1
            traceback.print_exc()
            print(f"FAILED: python -m tests.random_cases --only {kind.name} --seed {number} --seconds 0")
    print(f"seed {options.seed}: {cases} cases, {failures} failures")
    return min(failures, 100)


if __name__ == "__main__":
    sys.exit(main())
