import os
import sys

import numpy as np
from flax.training import checkpoints


def count(workdir):
    """How many checkpoints there are: the other things there are folders."""
    return len([e for e in os.scandir(workdir) if e.is_file()])  # expect: only-files


if __name__ == "__main__":
    os.makedirs(os.path.join(sys.argv[1], "logs"))
    for n in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=9)
    print(count(sys.argv[1]))
