import sys

import numpy as np
from flax.training import checkpoints


def number(device):
    return int("".join(filter(str.isdigit, device)))


if __name__ == "__main__":
    path = checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, number("gpu12"))
    print(path.endswith("_12"))
