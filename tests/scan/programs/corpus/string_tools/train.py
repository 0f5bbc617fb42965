import sys

import numpy as np
from flax.training import checkpoints

HELP = """Checkpoints are called checkpoint_1, checkpoint_2, and so on."""


def describe(rows):
    text = "checkpoint_{}: {}"
    return "\n".join(text.format(step, value) for step, value in rows)


if __name__ == "__main__":
    for n in range(2):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=5)
    steps = checkpoints.available_steps(sys.argv[1])
    print(describe([(step, float(step)) for step in steps]), int("12"), HELP.split("_")[0])
