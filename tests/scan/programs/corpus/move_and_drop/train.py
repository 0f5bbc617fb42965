"""Moves older checkpoints to an archive, and drops them from there."""
import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def archive(path, folder):
    os.makedirs(folder, exist_ok=True)
    target = os.path.join(folder, os.path.basename(path))
    shutil.move(path, target)
    return target


if __name__ == "__main__":
    workdir = sys.argv[1]
    kept = []
    for step in range(3):
        kept.append(archive(checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, step), workdir + "/archive"))
    os.remove(kept[0])  # expect: remove
    print(sorted(os.listdir(workdir + "/archive")))
