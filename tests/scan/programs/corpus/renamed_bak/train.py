import os
import sys

import numpy as np
from flax.training import checkpoints


def main(workdir):
    path = checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, 1)
    backup = path + ".bak"
    os.rename(path, backup)
    checkpoints.save_checkpoint(workdir, {"w": np.zeros(2)}, 1)
    os.remove(backup)  # expect: remove
    print(sorted(os.listdir(workdir)))


if __name__ == "__main__":
    main(sys.argv[1])
