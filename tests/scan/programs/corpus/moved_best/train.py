import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def keep_best(path, best_dir):
    os.makedirs(best_dir, exist_ok=True)
    for name in os.listdir(best_dir):
        os.remove(os.path.join(best_dir, name))  # expect: remove
    shutil.move(path, best_dir)


def main(root):
    for step in range(2):
        path = checkpoints.save_checkpoint(os.path.join(root, "run"), {"w": np.ones(2)}, step, keep=9)
        keep_best(path, os.path.join(root, "best"))
    print(os.listdir(os.path.join(root, "best")))


if __name__ == "__main__":
    main(sys.argv[1])
