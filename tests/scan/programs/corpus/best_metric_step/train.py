"""A metric as the step, and the step read back from the name."""
import sys

import numpy as np
from flax.training import checkpoints


def best(workdir):
    path = checkpoints.latest_checkpoint(workdir, prefix="acc_")
    return float(path[path.rfind("_") + 1 :])  # expect: parse-name


if __name__ == "__main__":
    for accuracy in (0.5, 0.75):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, accuracy, prefix="acc_")
    print(best(sys.argv[1]))
