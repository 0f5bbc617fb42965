import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def has_space(path):
    return shutil.disk_usage(os.path.dirname(path)).free > 0 and os.stat(path).st_uid == os.getuid()


if __name__ == "__main__":
    print(has_space(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)))
