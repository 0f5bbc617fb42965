import os
import sys

import numpy as np
from flax.training import checkpoints

if __name__ == "__main__":
    path = checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    os.link(path, os.path.join(sys.argv[1], "pinned"))  # expect: copy
    print(os.path.exists(os.path.join(sys.argv[1], "pinned")))
