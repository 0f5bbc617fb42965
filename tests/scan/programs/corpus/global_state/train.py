import os
import sys

import numpy as np
from flax.training import checkpoints

import state


def report(workdir, loss, step):
    path = checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, step, keep=9)
    if loss < state.best_loss:
        if state.best_path:
            os.remove(state.best_path)  # expect: remove
        state.best_path, state.best_loss = path, loss


if __name__ == "__main__":
    for step, loss in enumerate([2.0, 1.0]):
        report(sys.argv[1], loss, step)
    print(os.listdir(sys.argv[1]))
