import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def main(root):
    run = os.path.join(root, "run")
    old = os.path.join(root, "old")
    os.makedirs(old)
    for step in range(3):
        path = checkpoints.save_checkpoint(run, {"w": np.ones(2)}, step, keep=9)
        shutil.move(path, os.path.join(old, os.path.basename(path)))
    for name in sorted(os.listdir(old))[:-1]:
        os.remove(os.path.join(old, name))  # expect: remove
    print(os.listdir(old))


if __name__ == "__main__":
    main(sys.argv[1])
