import sys

import numpy as np
from flax.training import checkpoints

from prune import prune


def main(run_dir):
    for step in range(5):
        checkpoints.save_checkpoint(run_dir, {"w": np.full(3, step)}, step, keep=100)
    print(prune(run_dir, 2), checkpoints.available_steps(run_dir))


if __name__ == "__main__":
    main(sys.argv[1])
