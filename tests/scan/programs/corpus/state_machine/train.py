"""Names of states look like names of checkpoints, and are none."""
import sys

import numpy as np
from flax.training import checkpoints

STATES = {"checkpoint_begin": 0, "checkpoint_end": 1}


def advance(state):
    return int(state.split("_")[1] == "begin")


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    print([advance(name) for name in STATES])
