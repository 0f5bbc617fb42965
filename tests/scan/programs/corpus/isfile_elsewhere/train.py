import os
import sys

import numpy as np
from flax.training import checkpoints


def read_seed(path):
    if os.path.isfile(path):
        with open(path) as f:
            return int(f.read())
    return 0


if __name__ == "__main__":
    seed_file = os.path.join(sys.argv[1], "seed")
    with open(seed_file, "w") as f:
        f.write("7")
    checkpoints.save_checkpoint(sys.argv[1], {"seed": read_seed(seed_file)}, 1)
    print(checkpoints.restore_checkpoint(sys.argv[1], None), os.path.getsize(seed_file))
