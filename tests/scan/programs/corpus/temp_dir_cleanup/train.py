import os
import shutil
import sys
import tempfile

import numpy as np
from flax.training import checkpoints


def dry_run(state):
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoints.save_checkpoint(folder, state, 0)
        return checkpoints.restore_checkpoint(path, state)


def wipe(workdir):
    if os.path.exists(workdir):
        shutil.rmtree(workdir)
    os.makedirs(workdir)


if __name__ == "__main__":
    workdir = os.path.join(sys.argv[1], "run")
    checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 0)
    wipe(workdir)
    print(os.listdir(workdir), dry_run({"w": np.ones(2)}))
