import glob
import os
import re
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def export(workdir, out):
    os.makedirs(out)
    for path in glob.glob(os.path.join(workdir, "*")):  # expect: glob
        if re.search(r"checkpoint_\d+$", path):
            shutil.copy2(path, os.path.join(out, os.path.basename(path)))  # expect: copy
    return sorted(os.listdir(out))


if __name__ == "__main__":
    run = os.path.join(sys.argv[1], "run")
    for step in (1, 2):
        checkpoints.save_checkpoint(run, {"w": np.ones(2)}, step, keep=9)
    print(export(run, os.path.join(sys.argv[1], "out")))
