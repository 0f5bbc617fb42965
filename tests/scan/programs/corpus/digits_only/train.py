import os
import sys

import numpy as np
from flax.training import checkpoints


def step_of(path):
    digits = "".join(filter(str.isdigit, os.path.basename(path)))
    return int(digits)  # expect: parse-name


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 12)
    print(step_of(checkpoints.latest_checkpoint(sys.argv[1])))
