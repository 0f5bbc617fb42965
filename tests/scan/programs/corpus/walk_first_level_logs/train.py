import os
import sys

import numpy as np
from flax.training import checkpoints


def have_logs(folder):
    _, _, files = next(os.walk(folder))
    return any(name.startswith("events") for name in files)


if __name__ == "__main__":
    workdir = sys.argv[1]
    open(os.path.join(workdir, "events.1"), "w").close()
    checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, 1)
    print(have_logs(workdir))
