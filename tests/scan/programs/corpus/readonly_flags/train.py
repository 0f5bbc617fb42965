import os
import stat
import sys

import numpy as np
from flax.training import checkpoints


def protect(path):
    os.chmod(path, os.stat(path).st_mode | stat.S_IRGRP)
    return bool(os.stat(path).st_mode & stat.S_IRGRP)


if __name__ == "__main__":
    print(protect(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)))
