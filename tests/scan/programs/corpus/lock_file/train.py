import os
import sys

import numpy as np
from flax.training import checkpoints

import locks


def main(workdir):
    lock = os.path.join(workdir, "checkpoint.lock")
    locks.acquire(lock)
    checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 1)
    locks.release(lock)
    print(os.listdir(workdir))


if __name__ == "__main__":
    main(sys.argv[1])
