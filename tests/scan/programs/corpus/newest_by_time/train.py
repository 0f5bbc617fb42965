import sys

import numpy as np
from flax.training import checkpoints

import load

if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    print(load.first_byte(sys.argv[1]))
