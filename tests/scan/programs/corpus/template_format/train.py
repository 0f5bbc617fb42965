import os
import sys

import numpy as np
from flax.training import checkpoints

TEMPLATE = "{workdir}/{prefix}{step}"


def exists(workdir, step, prefix="checkpoint_"):
    return os.path.isfile(TEMPLATE.format(workdir=workdir, step=step, prefix=prefix))  # expect: is-file


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    print(exists(sys.argv[1], 1), exists(sys.argv[1], 2))
