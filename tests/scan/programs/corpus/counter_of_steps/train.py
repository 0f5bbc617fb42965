import os
import sys

import numpy as np
from flax.training import checkpoints


def count(workdir):
    return len([e for e in os.scandir(workdir) if e.is_file() and e.name.endswith(".csv")])


if __name__ == "__main__":
    open(os.path.join(sys.argv[1], "a.csv"), "w").close()
    for n in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=9)
    print(count(sys.argv[1]), len(checkpoints.available_steps(sys.argv[1])))
