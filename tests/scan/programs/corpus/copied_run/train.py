import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def main(root):
    run, backup = os.path.join(root, "run"), os.path.join(root, "backup")
    checkpoints.save_checkpoint(run, {"w": np.ones(2)}, 1)
    with open(os.path.join(run, "train.log"), "w") as file:
        file.write("x")
    shutil.copytree(run, backup, ignore=shutil.ignore_patterns("*.log"))
    print(checkpoints.latest_checkpoint(backup) is not None, os.listdir(backup))


if __name__ == "__main__":
    main(sys.argv[1])
