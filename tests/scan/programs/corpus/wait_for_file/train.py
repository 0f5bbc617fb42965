import sys

import numpy as np
from flax.training import checkpoints

from evaluate import wait_for

if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 4)
    print(wait_for(sys.argv[1], 4, timeout=0.3))
