import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def scratch():
    return os.environ.get("SCRATCH_OF_TEST", "/nonexistent")


def stage(workdir):
    target = os.path.join(scratch(), "staged")
    if os.path.isdir(target):
        shutil.rmtree(target)
    shutil.copytree(workdir, target)
    return target


if __name__ == "__main__":
    os.environ["SCRATCH_OF_TEST"] = sys.argv[1] + "_scratch"
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    target = stage(sys.argv[1])
    print(checkpoints.available_steps(target))
    shutil.rmtree(os.path.dirname(target))
