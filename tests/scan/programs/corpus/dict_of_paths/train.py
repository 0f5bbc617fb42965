import os
import sys

import numpy as np
from flax.training import checkpoints

from registry import Registry

if __name__ == "__main__":
    workdir = sys.argv[1]
    registry = Registry(os.path.join(workdir, "registry.json"))
    for epoch in range(2):
        registry.add(epoch, checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, epoch, keep=5))
    registry.forget(0)
    print(sorted(os.listdir(workdir)))
