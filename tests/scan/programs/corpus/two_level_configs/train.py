import json
import os
import sys

import numpy as np
from flax.training import checkpoints

import sweep

if __name__ == "__main__":
    for run in "ab":
        folder = os.path.join(sys.argv[1], run)
        checkpoints.save_checkpoint(folder, {"w": np.ones(1)}, 1)
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump({"run": run}, f)
    print(list(sweep.configs(sys.argv[1])))
