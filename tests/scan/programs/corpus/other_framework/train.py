import os
import sys

import numpy as np
from flax.training import checkpoints

from convert import fetch

if __name__ == "__main__":
    with open(os.path.join(sys.argv[1], "resnet.pth"), "wb") as f:
        f.write(b"\0" * 8)
    weights = fetch(sys.argv[1])
    checkpoints.save_checkpoint(os.path.join(sys.argv[1], "run"), {"w": weights}, 0)
    print(weights)
