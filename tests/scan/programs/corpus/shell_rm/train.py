import subprocess
import sys

import numpy as np
from flax.training import checkpoints


def drop(path):
    return subprocess.call(["rm", path])  # expect: shell-remove


if __name__ == "__main__":
    print(drop(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 3)))
