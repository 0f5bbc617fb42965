"""What is new in the run directory after a save, and is copied out."""
import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def save_and_export(workdir, out, step):
    before = set(os.listdir(workdir))
    checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, step, keep=9)
    for name in sorted(set(os.listdir(workdir)) - before):
        shutil.copy(os.path.join(workdir, name), out)  # expect: copy


if __name__ == "__main__":
    run, out = os.path.join(sys.argv[1], "run"), os.path.join(sys.argv[1], "out")
    os.makedirs(run)
    os.makedirs(out)
    save_and_export(run, out, 1)
    print(os.listdir(out))
