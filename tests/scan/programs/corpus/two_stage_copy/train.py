import os
import sys

import numpy as np
from flax.training import checkpoints

from files import Files

if __name__ == "__main__":
    path = checkpoints.save_checkpoint(os.path.join(sys.argv[1], "run"), {"w": np.ones(2)}, 1)
    Files.replace(path, os.path.join(sys.argv[1], "best"))
    print(sorted(os.listdir(sys.argv[1])))
