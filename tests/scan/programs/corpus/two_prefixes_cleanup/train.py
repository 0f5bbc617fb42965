"""Two families of checkpoints; the temporary one is removed by pattern."""
import fnmatch
import os
import sys

import numpy as np
from flax.training import checkpoints


def main(run):
    checkpoints.save_checkpoint(run, {"w": np.ones(1)}, 1)
    checkpoints.save_checkpoint(run, {"w": np.ones(1)}, 1, "warmup_")
    for entry in os.listdir(run):  # expect: glob
        if fnmatch.fnmatch(entry, "warmup_*"):
            os.remove(os.path.join(run, entry))  # expect: remove
    print(os.listdir(run))


if __name__ == "__main__":
    main(sys.argv[1])
