"""Best checkpoint under a name of its own, which is replaced by a rename."""
import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def promote(path):
    folder = os.path.dirname(path)
    shutil.copy(path, os.path.join(folder, "best_model.tmp"))  # expect: copy
    os.replace(os.path.join(folder, "best_model.tmp"), os.path.join(folder, "best_model"))


if __name__ == "__main__":
    promote(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1))
    print(sorted(os.listdir(sys.argv[1])))
