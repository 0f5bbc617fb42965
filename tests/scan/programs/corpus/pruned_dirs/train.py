import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def remove_profiles(workdir):
    for folder, folders, _ in os.walk(workdir):
        for name in list(folders):
            if name.startswith("plugins"):
                shutil.rmtree(os.path.join(folder, name))
                folders.remove(name)


if __name__ == "__main__":
    os.makedirs(os.path.join(sys.argv[1], "plugins", "profile"))
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    remove_profiles(sys.argv[1])
    print(os.listdir(sys.argv[1]))
