import os
import sys
import time

import numpy as np
from flax.training import checkpoints


def rows(workdir):
    for step in checkpoints.available_steps(workdir):
        path = os.path.join(workdir, f"checkpoint_{step}")
        yield step, time.localtime(os.path.getmtime(path)).tm_year > 2000, os.access(path, os.R_OK)


if __name__ == "__main__":
    for n in range(2):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=9)
    for row in rows(sys.argv[1]):
        print("{} {} {}".format(*row))
