"""Sums the bytes of a run, however it is made of files and folders."""
import os
import sys

import numpy as np
from flax.training import checkpoints


def total(workdir):
    size = 0
    for root, _, files in os.walk(workdir):
        for name in files:
            size += os.path.getsize(os.path.join(root, name))
    return size


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(50_000)}, 1)
    print(total(sys.argv[1]) > 10_000)
