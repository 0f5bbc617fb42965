import sys

import numpy as np
from flax.training import checkpoints

from evaluate import todo

if __name__ == "__main__":
    for n in range(2):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=9)
    print(todo(sys.argv[1], {"checkpoint_0"}))
