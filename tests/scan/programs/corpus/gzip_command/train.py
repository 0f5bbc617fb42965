import subprocess
import sys

import numpy as np
from flax.training import checkpoints


def compress(path):
    command = f"gzip --keep {path}"
    return subprocess.call(command, shell=True)  # expect: open


if __name__ == "__main__":
    print(compress(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)))
