"""Begins anew: empties the run directory."""
import os
import sys

import numpy as np
from flax.training import checkpoints


def fresh(workdir):
    for name in os.listdir(workdir):
        os.remove(os.path.join(workdir, name))  # expect: remove


if __name__ == "__main__":
    workdir = sys.argv[1]
    checkpoints.save_checkpoint(workdir, {"w": np.ones(3)}, 1)
    fresh(workdir)
    print(os.listdir(workdir))
