import os
import sys

import numpy as np
from flax.training import checkpoints

from manager import Metrics

if __name__ == "__main__":
    metrics = Metrics(sys.argv[1])
    for n in range(2):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=9)
        metrics.keep(n, {"loss": n})
    print(os.listdir(metrics.folder))
