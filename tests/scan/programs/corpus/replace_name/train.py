"""The backup's name is made from the checkpoint's."""
import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def backup(path):
    target = path.replace("checkpoint_", "backup_")
    shutil.copyfile(path, target)  # expect: copy
    return target


if __name__ == "__main__":
    print(os.path.basename(backup(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1))))
