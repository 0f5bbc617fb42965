"""Splits names that are not those of checkpoints."""
import sys

import numpy as np
from flax.training import checkpoints


def run_number(name):
    return int(name.split("_")[-1])


def parse_layers(params):
    return sorted(int(key.split("_")[1]) for key in params)


if __name__ == "__main__":
    params = {"block_0": np.ones(1), "block_1": np.ones(1)}
    path = checkpoints.save_checkpoint(sys.argv[1], params, 5)
    print(run_number("run_17"), parse_layers(checkpoints.restore_checkpoint(path, None)))
