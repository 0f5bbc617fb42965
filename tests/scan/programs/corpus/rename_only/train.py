import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def main(workdir):
    path = checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, 3)
    os.rename(path, os.path.join(workdir, "final"))
    shutil.move(os.path.join(workdir, "final"), os.path.join(workdir, "released"))
    return checkpoints.restore_checkpoint(os.path.join(workdir, "released"), None)


if __name__ == "__main__":
    print(main(sys.argv[1]))
