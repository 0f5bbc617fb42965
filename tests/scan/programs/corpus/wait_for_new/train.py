import glob
import sys
import time

import numpy as np
from flax.training import checkpoints


def wait(folder, seen):
    for _ in range(3):
        new = set(glob.glob(folder + "/checkpoint_*")) - seen  # expect: glob
        if new:
            return new
        time.sleep(0.01)
    return set()


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 1)
    print(len(wait(sys.argv[1], set())))
