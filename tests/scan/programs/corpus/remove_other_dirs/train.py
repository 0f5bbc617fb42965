"""Clears the folders of earlier evaluations from the run directory: checkpoints were files, so they stayed."""
import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def clear_eval_folders(workdir):
    for name in os.listdir(workdir):
        path = os.path.join(workdir, name)
        if os.path.isdir(path):
            shutil.rmtree(path)  # expect: remove-folders


def main(workdir):
    checkpoints.save_checkpoint(workdir, {"w": np.ones(3)}, 1)
    os.makedirs(os.path.join(workdir, "eval_samples"))
    clear_eval_folders(workdir)
    print(sorted(os.listdir(workdir)))


if __name__ == "__main__":
    main(sys.argv[1])
