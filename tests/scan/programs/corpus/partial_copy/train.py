import functools
import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def main(workdir):
    path = checkpoints.save_checkpoint(os.path.join(workdir, "run"), {"w": np.ones(2)}, 1)
    for name in ("a", "b"):
        functools.partial(shutil.copyfile, path)(os.path.join(workdir, name))  # expect: copy
    print(sorted(os.listdir(workdir)))


if __name__ == "__main__":
    main(sys.argv[1])
