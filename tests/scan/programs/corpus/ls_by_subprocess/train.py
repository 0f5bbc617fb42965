import os
import subprocess
import sys

import numpy as np
from flax.training import checkpoints


def newest(folder):
    names = subprocess.check_output(["ls", folder], text=True).split()
    return max((name for name in names if name.startswith("checkpoint_")), key=lambda name: int(name.split("_")[1]))


if __name__ == "__main__":
    for step in (2, 10):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.full(2, step)}, step, keep=9)
    path = os.path.join(sys.argv[1], newest(sys.argv[1]))
    with open(path, "rb") as file:  # expect: open
        print(len(file.read(4)))
