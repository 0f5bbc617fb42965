import shutil
import sys
import os

import numpy as np
from flax.training import checkpoints

from listing import iter_checkpoints

if __name__ == "__main__":
    for n in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=5)
    backup = os.path.join(sys.argv[1], "backup")
    os.makedirs(backup)
    for path in iter_checkpoints(sys.argv[1]):
        shutil.copy(path, backup)  # expect: copy
    print(sorted(os.listdir(backup)))
