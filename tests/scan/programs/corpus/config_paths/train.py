import os
import sys

import numpy as np
from flax.training import checkpoints

from settings import Settings


def finish(settings):
    for step in os.listdir(settings.workdir):  # expect: glob
        if "checkpoint" in step and step != "checkpoint_2":
            os.unlink(settings.workdir + "/" + step)  # expect: remove


if __name__ == "__main__":
    settings = Settings(sys.argv[1])
    for step in range(settings.steps):
        checkpoints.save_checkpoint(settings.workdir, {"w": np.ones(2)}, step, keep=9)
    finish(settings)
    print(os.listdir(sys.argv[1]))
