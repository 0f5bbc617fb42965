import os
import sys

import numpy as np
from absl import logging
from flax.training import checkpoints


def load(workdir, step, state):
    path = os.path.join(workdir, f"checkpoint_{step}")
    if not os.path.exists(path):
        logging.warning("no %s", path)
        return state
    logging.info("restore %s, written %s", path, os.path.getmtime(path))
    return checkpoints.restore_checkpoint(path, state)


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 3)
    print(load(sys.argv[1], 3, {"w": np.zeros(2)}), load(sys.argv[1], 4, None))
