import os
import sys

import numpy as np
from flax.training import checkpoints

import hooks


def log_size(path):
    print(os.path.getsize(path) > 100_000)  # expect: size


hooks.register("after_save", log_size)

if __name__ == "__main__":
    hooks.fire("after_save", checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(99_999)}, 1))
