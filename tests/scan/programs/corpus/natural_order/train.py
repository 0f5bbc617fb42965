import os
import sys

import numpy as np
from flax.training import checkpoints

from ordering import natural_key


def oldest_first(folder):
    found = [os.path.join(folder, name) for name in os.listdir(folder) if "checkpoint" in name]  # expect: glob
    found.sort(key=natural_key)
    return found


if __name__ == "__main__":
    for n in (9, 10, 11):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=9)
    for path in oldest_first(sys.argv[1])[:2]:
        os.remove(path)  # expect: remove
    print(os.listdir(sys.argv[1]))
