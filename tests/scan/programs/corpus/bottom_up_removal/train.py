import os
import sys

import numpy as np
from flax.training import checkpoints


def clear(top):
    for root, folders, files in os.walk(top, topdown=False):
        for name in files:
            os.remove(os.path.join(root, name))
        for name in folders:
            os.rmdir(os.path.join(root, name))


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 1)
    clear(sys.argv[1])
    print(os.listdir(sys.argv[1]))
