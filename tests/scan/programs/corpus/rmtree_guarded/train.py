import os
import sys

import numpy as np
from flax.training import checkpoints

from utils import remove

if __name__ == "__main__":
    saved = [checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=5) for n in range(3)]
    for path in saved[:-1]:
        remove(path)
    print(os.listdir(sys.argv[1]))
