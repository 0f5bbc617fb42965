import os
import sys

import numpy as np
from flax.training import checkpoints

from paths import Paths

if __name__ == "__main__":
    Paths.ROOT = sys.argv[1]
    checkpoints.save_checkpoint(Paths.ROOT, {"w": np.ones(1)}, 4, prefix=Paths.NAME)
    with open(Paths.of(4), "rb") as f:  # expect: open
        print(len(f.read()) > 3)
