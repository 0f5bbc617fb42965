import fnmatch
import os
import sys

import numpy as np
from flax.training import checkpoints


def cleanup(model_dir, keep_step):
    for name in fnmatch.filter(os.listdir(model_dir), "checkpoint_*"):  # expect: glob
        if name != f"checkpoint_{keep_step}":
            os.remove(os.path.join(model_dir, name))  # expect: remove


if __name__ == "__main__":
    for n in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=9)
    cleanup(sys.argv[1], 1)
    print(os.listdir(sys.argv[1]))
