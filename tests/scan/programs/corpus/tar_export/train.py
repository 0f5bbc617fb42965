import os
import sys
import tarfile

import numpy as np
from flax.training import checkpoints


def pack(path, target):
    with tarfile.open(target, "w") as tar:
        tar.add(path, arcname=os.path.basename(path))
    return os.path.getsize(target) > 1000


if __name__ == "__main__":
    path = checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(200)}, 3)
    print(pack(path, sys.argv[1] + "/model.tar"))
    os.remove(sys.argv[1] + "/model.tar")
