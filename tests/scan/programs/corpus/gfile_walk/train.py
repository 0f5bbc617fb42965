import sys

import numpy as np
from flax.training import checkpoints

from retention import keep_last

if __name__ == "__main__":
    for step in (1, 2, 3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=50)
    print(keep_last(sys.argv[1], 1), checkpoints.available_steps(sys.argv[1]))
