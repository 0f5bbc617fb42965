import os
import sys

import numpy as np
from flax.training import checkpoints

from records import Saved


def train(workdir):
    history = []
    for step, loss in enumerate((0.4, 0.2, 0.3)):
        path = checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, step, keep=9)
        history.append(Saved(step, path, loss))
    best = min(history, key=lambda one: one.loss)
    for one in history:
        if one.step != best.step:
            os.remove(one.path)  # expect: remove
    return best


if __name__ == "__main__":
    print(train(sys.argv[1]).step, os.listdir(sys.argv[1]))
