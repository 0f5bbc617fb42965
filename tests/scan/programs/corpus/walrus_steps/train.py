import os
import re
import sys

import numpy as np
from flax.training import checkpoints

STEP = re.compile("checkpoint_([0-9]+)")


def steps(folder):
    return sorted(int(m.group(1)) for name in os.listdir(folder) if (m := STEP.fullmatch(name)))  # expect: glob, parse-name


if __name__ == "__main__":
    for step in (1, 2, 10):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=9)
    print(steps(sys.argv[1]))
