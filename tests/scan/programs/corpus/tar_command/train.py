import os
import subprocess
import sys

import numpy as np
from flax.training import checkpoints


def pack(path):
    target = path + ".tar.gz"
    subprocess.check_call(["tar", "czf", target, "-C", os.path.dirname(path), os.path.basename(path)])
    size = os.path.getsize(target)
    os.remove(target)
    return size > 0


if __name__ == "__main__":
    print(pack(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)))
