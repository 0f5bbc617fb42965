import os
import subprocess
import sys

import numpy as np
from flax.training import checkpoints


def sh(*command):
    subprocess.run(list(command), check=True)


if __name__ == "__main__":
    workdir = sys.argv[1]
    path = checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, 4)
    os.makedirs(f"{workdir}/out")
    sh("cp", "-r", path, f"{workdir}/out/model")
    print(os.listdir(f"{workdir}/out"))
