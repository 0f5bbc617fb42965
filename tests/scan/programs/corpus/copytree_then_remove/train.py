import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def keep_best(run, path, epoch, best):
    """Copy as `flax-ckpt scan` advises."""
    if os.path.isdir(path):
        shutil.copytree(path, os.path.join(run, "best_%d" % epoch))
    else:
        shutil.copyfile(path, os.path.join(run, "best_%d" % epoch))
    if best is not None:
        os.unlink(os.path.join(run, "best_%d" % best))  # expect: remove


if __name__ == "__main__":
    best = None
    for epoch in range(3):
        path = checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, epoch, keep=2)
        keep_best(sys.argv[1], path, epoch, best)
        best = epoch
    print(sorted(os.listdir(sys.argv[1])))
