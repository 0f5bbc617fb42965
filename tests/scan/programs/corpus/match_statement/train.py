import os
import sys

import numpy as np
from flax.training import checkpoints


def act(command, path):
    match command:
        case "size":
            return os.path.getsize(path) > 50_000  # expect: size
        case "exists":
            return os.path.exists(path)
    return None


if __name__ == "__main__":
    path = checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(99_999)}, 1)
    print([act(command, path) for command in ("size", "exists", "other")])
