import os
import sys

import numpy as np
from flax.training import checkpoints


def point(path, workdir):
    link = os.path.join(workdir, "latest")
    if os.path.lexists(link):
        os.remove(link)
    os.symlink(path, link)
    return link


if __name__ == "__main__":
    for n in range(2):
        link = point(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=5), sys.argv[1])
    with open(link, "rb") as f:  # expect: open
        print(len(f.read()) > 5)
