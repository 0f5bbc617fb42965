import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def archive(workdir, store):
    os.makedirs(store, exist_ok=True)
    names = sorted(os.listdir(workdir), key=lambda n: os.stat(os.path.join(workdir, n)).st_mtime)
    for name in names[:-1]:
        shutil.move(os.path.join(workdir, name), os.path.join(store, name))


if __name__ == "__main__":
    workdir, store = sys.argv[1] + "/run", sys.argv[1] + "/store"
    for n in range(3):
        checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, n, keep=9)
    archive(workdir, store)
    print(sorted(os.listdir(store)), checkpoints.available_steps(store))
