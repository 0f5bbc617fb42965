import contextlib
import os
import sys

import numpy as np
from flax.training import checkpoints


def forget(workdir, step):
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{workdir}/{'checkpoint_'}{step}")  # expect: remove


if __name__ == "__main__":
    for step in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=9)
    forget(sys.argv[1], 0)
    print(sorted(os.listdir(sys.argv[1])))
