import os
import shutil
import subprocess
import sys

import numpy as np
from flax.training import checkpoints


def main(run):
    for epoch in range(2):
        path = checkpoints.save_checkpoint(run, {"w": np.ones(2)}, epoch, keep=9)
        if os.path.exists(f"{run}/best"):
            subprocess.run(["rm", f"{run}/best"], check=True, stderr=subprocess.DEVNULL)  # expect: shell-remove
        (shutil.copytree if os.path.isdir(path) else shutil.copyfile)(path, f"{run}/best")
    print(os.path.exists(f"{run}/best"))


if __name__ == "__main__":
    main(sys.argv[1])
