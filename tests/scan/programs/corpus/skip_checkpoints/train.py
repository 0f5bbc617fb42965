"""Copies everything but the checkpoints."""
import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def copy_rest(workdir, to):
    os.makedirs(to)
    for name in sorted(os.listdir(workdir)):
        if name.startswith("checkpoint_"):
            continue
        shutil.copy(os.path.join(workdir, name), to)


if __name__ == "__main__":
    workdir = os.path.join(sys.argv[1], "run")
    checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 1)
    open(os.path.join(workdir, "log.txt"), "w").close()
    copy_rest(workdir, os.path.join(sys.argv[1], "copy"))
    print(os.listdir(os.path.join(sys.argv[1], "copy")))
