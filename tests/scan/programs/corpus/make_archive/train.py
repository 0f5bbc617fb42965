import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def bundle(workdir, target):
    return shutil.make_archive(target, "zip", workdir)


if __name__ == "__main__":
    workdir = os.path.join(sys.argv[1], "run")
    checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 1)
    archive = bundle(workdir, os.path.join(sys.argv[1], "bundle"))
    print(os.path.getsize(archive) > 100)
    os.remove(archive)
