import os
import sys

import numpy as np
from flax.training import checkpoints

from latest import latest_step

if __name__ == "__main__":
    for n in (1, 2):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, prefix="vae_", keep=9)
    step = latest_step(sys.argv[1], "vae_")
    with open(os.path.join(sys.argv[1], "vae_%d" % step), "rb") as f:  # expect: open
        print(len(f.read()) > 10)
