import os
import sys

import numpy as np
from flax.training import checkpoints

if __name__ == "__main__":
    run = sys.argv[1]
    for step in range(4):
        checkpoints.save_checkpoint(run, {"w": np.ones(1)}, step, keep=9)
    steps = sorted(checkpoints.available_steps(run))
    [os.remove(f"{run}/checkpoint_{step}") for step in steps[:-1]]  # expect: remove
    print(os.listdir(run))
