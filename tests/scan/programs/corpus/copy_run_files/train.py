import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def snapshot(workdir, to):
    os.makedirs(to)
    for name in sorted(os.listdir(workdir)):
        source = os.path.join(workdir, name)
        if os.path.isfile(source):  # expect: only-files
            shutil.copy(source, to)


if __name__ == "__main__":
    workdir = os.path.join(sys.argv[1], "run")
    checkpoints.save_checkpoint(workdir, {"w": np.ones(3)}, 1)
    with open(os.path.join(workdir, "config.json"), "w") as file:
        file.write("{}")
    snapshot(workdir, os.path.join(sys.argv[1], "copy"))
    print(sorted(os.listdir(os.path.join(sys.argv[1], "copy"))))
