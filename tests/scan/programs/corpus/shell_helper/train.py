import os
import subprocess
import sys

import numpy as np
from flax.training import checkpoints


def sh(command):
    subprocess.check_call(command, shell=True, stderr=subprocess.DEVNULL)  # expect: shell-copy


if __name__ == "__main__":
    workdir = sys.argv[1]
    path = checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, 4)
    os.makedirs(f"{workdir}/out")
    sh(f"cp {path} {workdir}/out/model")
    print(os.listdir(f"{workdir}/out"))
