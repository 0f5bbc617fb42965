import os
import sys

import numpy as np
from flax.training import checkpoints


def name_of(workdir, step):
    return "/".join([workdir, "checkpoint_" + str(step)])


if __name__ == "__main__":
    for step in (1, 2):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, step, keep=5)
    os.remove(name_of(sys.argv[1], 1))  # expect: remove
    print(os.listdir(sys.argv[1]))
