"""Files of a run are kept, folders go; and an error for folders is passed over."""
import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def collect(path, target):
    if os.path.isfile(path):  # expect: is-file
        os.replace(path, target)
    else:
        shutil.rmtree(path)


def forget(path):
    try:
        os.remove(path)  # expect: remove
    except IsADirectoryError:
        print("is a folder")


if __name__ == "__main__":
    run = os.path.join(sys.argv[1], "run")
    paths = [checkpoints.save_checkpoint(run, {"w": np.ones(2)}, step, keep=9) for step in range(2)]
    collect(paths[0], os.path.join(sys.argv[1], "kept"))
    forget(paths[1])
    print(sorted(os.listdir(sys.argv[1])), len(os.listdir(run)))
