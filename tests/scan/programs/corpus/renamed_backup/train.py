"""Keeps the old checkpoint under another name until the new one is written."""
import os
import sys

import numpy as np
from flax.training import checkpoints


def replace(run, state):
    current = os.path.join(run, "checkpoint_0")
    backup = current + ".bak"
    if os.path.exists(current):
        os.rename(current, backup)
    checkpoints.save_checkpoint(run, state, 0, overwrite=True)
    if os.path.exists(backup):
        os.remove(backup)  # expect: remove


if __name__ == "__main__":
    for _ in range(2):
        replace(sys.argv[1], {"w": np.ones(1)})
    print(os.listdir(sys.argv[1]))
