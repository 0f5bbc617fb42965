"""Copies whole run directories, never single checkpoints."""
import os
import sys

import numpy as np
from flax.training import checkpoints

import backup

if __name__ == "__main__":
    run = os.path.join(sys.argv[1], "run")
    for n in range(2):
        checkpoints.save_checkpoint(run, {"w": np.ones(1)}, n, keep=2)
    backup.backup(run, sys.argv[1] + "/backup")
    print(checkpoints.available_steps(sys.argv[1] + "/backup"))
    backup.drop(sys.argv[1] + "/backup")
