"""Removes TensorBoard's files from the run directory, nothing else."""
import glob
import os
import sys

import numpy as np
from flax.training import checkpoints


def remove_events(workdir):
    for path in glob.glob(os.path.join(workdir, "events.out.tfevents.*")):
        os.remove(path)
    for name in os.listdir(workdir):
        if not name.startswith("samples_"):
            continue
        os.remove(os.path.join(workdir, name))


if __name__ == "__main__":
    workdir = sys.argv[1]
    for name in ("events.out.tfevents.1", "samples_1"):
        open(os.path.join(workdir, name), "w").close()
    checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 1)
    remove_events(workdir)
    print(os.listdir(workdir))
