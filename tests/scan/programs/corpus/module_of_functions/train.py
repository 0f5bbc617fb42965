import os
import sys

import numpy as np
from flax.training import checkpoints

from ops import OPERATIONS

if __name__ == "__main__":
    paths = [checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=9) for n in (1, 2)]
    OPERATIONS["trash"](paths[0])
    OPERATIONS["delete"](paths[1])
    print(os.listdir(sys.argv[1]))
