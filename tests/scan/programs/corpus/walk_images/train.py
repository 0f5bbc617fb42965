import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def collect(workdir, target):
    os.makedirs(target)
    for folder, folders, files in os.walk(workdir):
        for file in files:
            if os.path.splitext(file)[1] == ".png":
                shutil.copy(os.path.join(folder, file), target)


if __name__ == "__main__":
    workdir = os.path.join(sys.argv[1], "run")
    os.makedirs(os.path.join(workdir, "images"))
    open(os.path.join(workdir, "images", "a.png"), "w").close()
    checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 1)
    collect(workdir, os.path.join(sys.argv[1], "pngs"))
    print(os.listdir(os.path.join(sys.argv[1], "pngs")))
