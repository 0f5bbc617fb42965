import os
import sys

import numpy as np
from flax.training import checkpoints

import export

if __name__ == "__main__":
    workdir = sys.argv[1]
    path = checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, 2)
    params = checkpoints.restore_checkpoint(path, None)
    print(export.export(params, os.path.join(workdir, "weights.npz")))
    print(export.load(os.path.join(workdir, "weights.npz")))
