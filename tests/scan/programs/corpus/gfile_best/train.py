import os
import sys

import numpy as np
from flax.training import checkpoints
from tensorflow.io import gfile


def update_best(workdir, step, previous):
    source = os.path.join(workdir, "checkpoint_%d" % step)
    target = os.path.join(workdir, "best", "model_%d" % step)
    gfile.makedirs(os.path.dirname(target))
    gfile.copy(source, target, overwrite=True)  # expect: copy
    if previous is not None:
        gfile.remove(previous)  # expect: remove
    return target


if __name__ == "__main__":
    kept = None
    for step in (1, 2, 3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(3)}, step)
        kept = update_best(sys.argv[1], step, kept)
    print(os.path.basename(kept))
