import mmap
import os
import sys

import numpy as np
from flax.training import checkpoints


def header(path):
    descriptor = os.open(path, os.O_RDONLY)
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as view:  # expect: open
        return len(view[:4])


if __name__ == "__main__":
    print(header(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)))
