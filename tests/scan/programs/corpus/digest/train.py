import hashlib
import os
import sys

import numpy as np
from flax.training import checkpoints


def sha256(filename):
    digest = hashlib.sha256()
    with open(filename, "rb") as f:  # expect: open
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def record(workdir, step):
    name = f"checkpoint_{step}"
    sums = {name: sha256(os.path.join(workdir, name))}
    return sums


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 2)
    print(len(record(sys.argv[1], 2)["checkpoint_2"]))
