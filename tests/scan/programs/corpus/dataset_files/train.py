import os
import sys

import numpy as np
from flax.training import checkpoints

import data

if __name__ == "__main__":
    images = os.path.join(sys.argv[1], "images")
    os.makedirs(images)
    for n in range(3):
        np.save(os.path.join(images, f"img_{n}_{n % 2}.npy"), np.ones(2))
    workdir = os.path.join(sys.argv[1], "run")
    checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 1)
    print(data.labels(images))
    data.clear(images)
    print(os.listdir(images), os.listdir(workdir))
