"""Loops of one function use the same name for other things."""
import glob
import os
import sys

import numpy as np
from flax.training import checkpoints


def tidy(workdir):
    for f in os.listdir(workdir):
        if f.endswith(".log"):
            os.remove(os.path.join(workdir, f))
    for f in glob.glob(os.path.join(workdir, "*.npz")):
        os.remove(f)
    for f in checkpoints.available_steps(workdir):
        print(int(f))


if __name__ == "__main__":
    np.savez(os.path.join(sys.argv[1], "a.npz"), np.ones(1))
    open(os.path.join(sys.argv[1], "a.log"), "w").close()
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 1)
    tidy(sys.argv[1])
    print(os.listdir(sys.argv[1]))
