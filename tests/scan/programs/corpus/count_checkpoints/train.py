import os
import sys

import numpy as np
from flax.training import checkpoints


def count(folder):
    return sum(1 for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name)) and "checkpoint_" in name)  # expect: is-file, glob


if __name__ == "__main__":
    for step in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=9)
    print(count(sys.argv[1]))
