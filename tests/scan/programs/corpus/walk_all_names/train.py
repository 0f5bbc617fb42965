import sys

import numpy as np
from flax.training import checkpoints

from find import find_all

if __name__ == "__main__":
    for run in "ab":
        checkpoints.save_checkpoint(f"{sys.argv[1]}/{run}", {"w": np.ones(1)}, 1)
    print(len(find_all(sys.argv[1], lambda name: name.startswith("checkpoint_"))))
