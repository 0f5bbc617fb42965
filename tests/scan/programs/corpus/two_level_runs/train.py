import os
import sys

import numpy as np
from flax.training import checkpoints

import sweep

if __name__ == "__main__":
    for run in "ab":
        checkpoints.save_checkpoint(os.path.join(sys.argv[1], run), {"w": np.ones(1)}, 1)
    for path in sweep.find(sys.argv[1]):
        with open(path, "rb") as f:  # expect: open
            print(len(f.read()) > 3)
