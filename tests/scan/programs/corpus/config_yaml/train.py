import sys

import numpy as np
from flax.training import checkpoints

from config import Config

if __name__ == "__main__":
    config = Config(sys.argv[1])
    config.write({"steps": 2})
    steps = config.read()["steps"]
    checkpoints.save_checkpoint(config.directory, {"w": np.ones(1)}, steps)
    print(steps, checkpoints.available_steps(config.directory))
