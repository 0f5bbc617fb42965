import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def remove(path):
    try:
        os.remove(path)
    except IsADirectoryError:
        shutil.rmtree(path)


def remove_any(path):
    (shutil.rmtree if os.path.isdir(path) else os.remove)(path)


def remove_file_or_tree(path):
    if os.path.isfile(path):
        os.remove(path)
    else:
        shutil.rmtree(path)


if __name__ == "__main__":
    for step, function in enumerate((remove, remove_any, remove_file_or_tree)):
        function(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=9))
    print(os.listdir(sys.argv[1]))
