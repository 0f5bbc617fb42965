import os
import sys

import numpy as np
from flax.training import checkpoints


def old(folder, keep):
    names = [name for name in os.listdir(folder) if name[:11] == "checkpoint_"]  # expect: glob
    names.sort(key=lambda name: int(name[11:]))  # expect: parse-name
    yield from (os.path.join(folder, name) for name in names[:-keep])


if __name__ == "__main__":
    for step in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=9)
    for path in old(sys.argv[1], 1):
        os.remove(path)  # expect: remove
    print(os.listdir(sys.argv[1]))
