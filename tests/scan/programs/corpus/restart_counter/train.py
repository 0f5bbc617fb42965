"""A file of the run counts restarts; it is read, parsed and replaced."""
import os
import sys

import numpy as np
from flax.training import checkpoints


def restarts(workdir):
    path = os.path.join(workdir, "restarts")
    count = 0
    if os.path.isfile(path):
        with open(path) as f:
            count = int(f.read().split(":")[1])
        os.remove(path)
    with open(path, "x") as f:
        f.write(f"restarts:{count + 1}")
    return count


if __name__ == "__main__":
    for _ in range(2):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1, overwrite=True)
        print(restarts(sys.argv[1]))
