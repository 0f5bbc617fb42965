"""The step of the newest checkpoint, from what a link points to."""
import os
import sys

import numpy as np
from flax.training import checkpoints


def link(path, workdir):
    target = os.path.join(workdir, "newest")
    if os.path.lexists(target):
        os.unlink(target)
    os.symlink(os.path.basename(path), target)
    return target


if __name__ == "__main__":
    for n in (3, 4):
        target = link(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=9), sys.argv[1])
    print(os.readlink(target), os.path.isdir(sys.argv[1]))
