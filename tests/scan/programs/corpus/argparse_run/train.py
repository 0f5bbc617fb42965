import argparse
import os
import sys

import numpy as np
from flax.training import checkpoints


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("logdir")
    parser.add_argument("--keep", type=int, default=1)
    return parser.parse_args()


def trim(args):
    files = [f for f in os.listdir(args.logdir) if os.path.isfile(os.path.join(args.logdir, f))]  # expect: only-files
    for f in files:
        os.remove(os.path.join(args.logdir, f))


if __name__ == "__main__":
    args = parse()
    for n in range(2):
        checkpoints.save_checkpoint(args.logdir, {"w": np.ones(1)}, n, keep=5)
    trim(args)
    print(os.listdir(args.logdir))
