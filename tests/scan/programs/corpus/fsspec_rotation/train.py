import os
import sys

import fsspec
import numpy as np
from flax.training import checkpoints


def main(workdir):
    fs = fsspec.filesystem("file")
    for step in range(3):
        checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, step, keep=9)
    for path in sorted(fs.glob(f"{workdir}/checkpoint_*"))[:-1]:  # expect: glob
        fs.rm_file(path)  # expect: remove
    print(os.listdir(workdir))


if __name__ == "__main__":
    main(sys.argv[1])
