import sys

import numpy as np
from flax.training import checkpoints

import evaluate


def run(workdir):
    path = checkpoints.save_checkpoint(workdir, {"w": np.zeros(100_000)}, 3)
    print(evaluate.size_of(path) > 100_000, evaluate.describe(path, {"loss": 1.0})["step"])


if __name__ == "__main__":
    run(sys.argv[1])
