import os
import sys

import numpy as np
from flax.training import checkpoints

from manager import BestKeeper

if __name__ == "__main__":
    keeper = BestKeeper(sys.argv[1])
    for n in range(2):
        keeper.keep(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=9))
    print(os.listdir(keeper.folder))
