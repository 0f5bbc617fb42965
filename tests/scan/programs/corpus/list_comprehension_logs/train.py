import os
import sys

import numpy as np
from flax.training import checkpoints

if __name__ == "__main__":
    run = sys.argv[1]
    for step in range(2):
        checkpoints.save_checkpoint(run, {"w": np.ones(1)}, step, keep=9)
        open(f"{run}/log_{step}", "w").close()
    [os.remove(f"{run}/log_{step}") for step in checkpoints.available_steps(run)]
    print(sorted(os.listdir(run)))
