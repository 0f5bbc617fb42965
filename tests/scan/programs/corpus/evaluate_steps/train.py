import sys

import numpy as np
from flax.training import checkpoints

from evaluate import load, todo

if __name__ == "__main__":
    for n in range(2):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.full(1, n)}, n, keep=9)
    print([load(sys.argv[1], step, {"w": np.zeros(1)}) for step in todo(sys.argv[1], {0})])
