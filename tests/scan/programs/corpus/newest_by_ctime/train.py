import glob
import os
import sys

import numpy as np
from flax.training import checkpoints


def newest(folder):
    return max(glob.glob(os.path.join(folder, "checkpoint_*")), key=os.path.getctime)  # expect: glob


if __name__ == "__main__":
    for step in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.full(2, step)}, step, keep=9)
    print(checkpoints.restore_checkpoint(newest(sys.argv[1]), None)["w"])
