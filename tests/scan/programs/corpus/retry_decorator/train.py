import os
import sys

import numpy as np
from flax.training import checkpoints

from utils import fetch

if __name__ == "__main__":
    cache = os.path.join(sys.argv[1], "cache")
    os.makedirs(cache)
    run = os.path.join(sys.argv[1], "run")
    checkpoints.save_checkpoint(run, {"w": np.ones(1)}, 2)
    print(os.path.basename(fetch(checkpoints.latest_checkpoint(run), cache)))
