import os
import sys

import numpy as np
from flax.training import checkpoints


def have_checkpoint(folder):
    _, _, files = next(os.walk(folder))  # expect: file-names
    return any(name.startswith("checkpoint") for name in files)


if __name__ == "__main__":
    workdir = sys.argv[1]
    print(have_checkpoint(workdir))
    checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, 1)
    print(have_checkpoint(workdir))
