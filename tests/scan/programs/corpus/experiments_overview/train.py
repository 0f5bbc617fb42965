import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints

from overview import runs

if __name__ == "__main__":
    for n in range(3):
        checkpoints.save_checkpoint(os.path.join(sys.argv[1], f"run_{n}"), {"w": np.ones(1)}, n)
    found = runs(sys.argv[1])
    shutil.rmtree(found[0])
    print(sorted(runs(sys.argv[1])), checkpoints.restore_checkpoint(found[2], None))
