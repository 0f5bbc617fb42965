"""Writes the path of the last checkpoint to a text file, and reads it."""
import os
import sys

import numpy as np
from flax.training import checkpoints


def remember(workdir, path):
    with open(os.path.join(workdir, "last_checkpoint.txt"), "w") as f:
        f.write(os.path.basename(path))


def recall(workdir):
    with open(os.path.join(workdir, "last_checkpoint.txt")) as f:
        return os.path.join(workdir, f.read().strip())


if __name__ == "__main__":
    remember(sys.argv[1], checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1))
    print(checkpoints.restore_checkpoint(recall(sys.argv[1]), None))
    os.remove(os.path.join(sys.argv[1], "last_checkpoint.txt"))
