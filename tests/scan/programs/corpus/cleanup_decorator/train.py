import functools
import os
import sys

import numpy as np
from flax.training import checkpoints


def cleans_up(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        path = function(*args, **kwargs)
        os.unlink(path)  # expect: remove
        return os.path.basename(path)

    return wrapper


@cleans_up
def trial(folder):
    return checkpoints.save_checkpoint(folder, {"w": np.ones(2)}, 1)


if __name__ == "__main__":
    print(trial(sys.argv[1]), os.listdir(sys.argv[1]))
