import os
import sys

import numpy as np
from flax.training import checkpoints


def remove(path):
    try:
        os.remove(path)  # expect: remove
    except OSError as error:
        print("could not remove", type(error).__name__)


if __name__ == "__main__":
    remove(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 1))
    print(os.listdir(sys.argv[1]))
