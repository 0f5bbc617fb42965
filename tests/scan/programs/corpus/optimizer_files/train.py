"""Numbered files of its own next to checkpoints: same style of names, another prefix."""
import glob
import os
import pickle
import sys

import numpy as np
from flax.training import checkpoints


def save_buffer(workdir, step, buffer):
    with open(os.path.join(workdir, f"replay_{step}"), "wb") as f:
        pickle.dump(buffer, f)
    for old in sorted(glob.glob(os.path.join(workdir, "replay_*")))[:-1]:
        os.remove(old)


def load_buffer(workdir):
    path = max(glob.glob(os.path.join(workdir, "replay_*")), key=os.path.getmtime)
    with open(path, "rb") as f:
        return pickle.load(f), int(path.rsplit("_", 1)[1])


if __name__ == "__main__":
    for step in range(2):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, step)
        save_buffer(sys.argv[1], step, [step])
    print(load_buffer(sys.argv[1]))
