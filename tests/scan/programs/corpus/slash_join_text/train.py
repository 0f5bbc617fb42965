import os
import sys

import numpy as np
from flax.training import checkpoints


def name_of(workdir, step):
    return "/".join([workdir, "note_" + str(step)])


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    open(name_of(sys.argv[1], 1), "w").close()
    os.remove(name_of(sys.argv[1], 1))
    print(os.listdir(sys.argv[1]))
