import os
import sys

import numpy as np
from flax.training import checkpoints
from tensorflow.io import gfile


def export(workdir, out):
    latest = checkpoints.latest_checkpoint(workdir)
    gfile.makedirs(out)
    gfile.copy(latest, os.path.join(out, "checkpoint"), overwrite=True)  # expect: copy


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 3)
    export(sys.argv[1], sys.argv[1] + "/out")
    print(os.listdir(sys.argv[1] + "/out"))
