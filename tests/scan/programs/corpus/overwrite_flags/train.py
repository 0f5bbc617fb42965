import os
import sys

import jax
import numpy as np
from flax.training import checkpoints


def save(workdir, state, step):
    if jax.process_index() == 0:
        checkpoints.save_checkpoint(os.path.abspath(workdir), state, step, keep=np.inf, overwrite=True)


if __name__ == "__main__":
    for step in (1, 5, 3):
        save(sys.argv[1], {"w": np.full(1, step)}, step)
    print(sorted(os.listdir(sys.argv[1])))
