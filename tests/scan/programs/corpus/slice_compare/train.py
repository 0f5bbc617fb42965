import os
import sys

import numpy as np
from flax.training import checkpoints

PREFIX = "state-"


def clean(log_dir, newest):
    for entry in os.listdir(log_dir):  # expect: glob
        if entry[: len(PREFIX)] == PREFIX and int(entry[len(PREFIX) :]) < newest:  # expect: parse-name
            os.remove(f"{log_dir}/{entry}")  # expect: remove


if __name__ == "__main__":
    for n in (1, 2):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, prefix=PREFIX, keep=9)
    clean(sys.argv[1], 2)
    print(os.listdir(sys.argv[1]))
