import os
import sys

import numpy as np
from flax.training import checkpoints

from storage import copy

if __name__ == "__main__":
    path = checkpoints.save_checkpoint(os.path.join(sys.argv[1], "run"), {"w": np.ones(2)}, 1)
    copy(path, os.path.join(sys.argv[1], "out", "model"))
    print(os.listdir(os.path.join(sys.argv[1], "out")))
