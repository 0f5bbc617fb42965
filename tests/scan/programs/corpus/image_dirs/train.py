import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def clear_images(workdir):
    images = os.path.join(workdir, "images")
    for name in os.listdir(images):
        path = os.path.join(images, name)
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.remove(path)


if __name__ == "__main__":
    os.makedirs(os.path.join(sys.argv[1], "images", "old"))
    open(os.path.join(sys.argv[1], "images", "1.png"), "w").close()
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    clear_images(sys.argv[1])
    print(sorted(os.listdir(sys.argv[1])), os.listdir(os.path.join(sys.argv[1], "images")))
