import os
import sys

import numpy as np
from flax.training import checkpoints

import filesystem


def main(workdir):
    export = os.path.join(workdir, "export")
    filesystem.makedirs(export)
    path = checkpoints.save_checkpoint(workdir, {"w": np.arange(3)}, 7)
    filesystem.copy(path, os.path.join(export, "model"))
    with open(os.path.join(workdir, "lock"), "w") as file:
        file.write("x")
    filesystem.remove(os.path.join(workdir, "lock"))
    print(os.listdir(export))


if __name__ == "__main__":
    main(sys.argv[1])
