import os
import sys

import numpy as np
from flax.training import checkpoints

HOOKS = []


def announce(path):
    print("saved", os.path.basename(path))


HOOKS.append(announce)

if __name__ == "__main__":
    path = checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    for hook in HOOKS:
        hook(path)
