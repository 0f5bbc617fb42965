import os
import sys

import numpy as np
from flax.training import checkpoints

from tools import removed_afterwards

if __name__ == "__main__":
    with removed_afterwards(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)) as path:
        print(checkpoints.restore_checkpoint(path, None))
    print(os.listdir(sys.argv[1]))
