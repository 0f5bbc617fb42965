import os
import re
import sys

import numpy as np
from flax.training import checkpoints


def step_of(name):
    match = re.search(r"_(\d+)$", name)  # expect: parse-name
    return int(match.group(1)) if match else None


if __name__ == "__main__":
    for step in (1, 5):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=9)
    print(step_of(checkpoints.latest_checkpoint(sys.argv[1])), step_of("lr_10"))
