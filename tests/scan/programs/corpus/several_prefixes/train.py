import os
import sys

import numpy as np
from flax.training import checkpoints

PREFIXES = ("gen_", "disc_")


def clear(folder):
    for name in sorted(os.listdir(folder)):  # expect: glob
        if name.startswith(PREFIXES):
            os.remove(os.path.join(folder, name))  # expect: remove


if __name__ == "__main__":
    for prefix in PREFIXES:
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 1, prefix=prefix)
    clear(sys.argv[1])
    print(os.listdir(sys.argv[1]))
