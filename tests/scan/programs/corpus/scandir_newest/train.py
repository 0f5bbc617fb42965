import os
import sys

import numpy as np
from flax.training import checkpoints


def newest(folder):
    return max(os.scandir(folder), key=lambda entry: entry.stat().st_mtime).path


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 1)
    print(checkpoints.restore_checkpoint(newest(sys.argv[1]), None)["w"])
