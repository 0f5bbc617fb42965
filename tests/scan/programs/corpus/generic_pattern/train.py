import os
import re
import sys

import numpy as np
from flax.training import checkpoints


def clear(folder):
    for name in sorted(os.listdir(folder)):
        match = re.match(r"(.+)_(\d+)$", name)
        if match and match.group(1) == "checkpoint":
            os.remove(os.path.join(folder, name))  # expect: remove


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 1)
    clear(sys.argv[1])
    print(os.listdir(sys.argv[1]))
