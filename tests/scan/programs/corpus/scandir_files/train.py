import os
import sys

import numpy as np
from flax.training.checkpoints import save_checkpoint


def newest(run_dir):
    with os.scandir(run_dir) as entries:  # expect: glob
        found = [entry for entry in entries if entry.is_file() and entry.name.startswith("checkpoint_")]  # expect: is-file
    return max(found, key=lambda entry: int(entry.name.split("_")[1])).name if found else None  # expect: parse-name


if __name__ == "__main__":
    for n in (3, 20):
        save_checkpoint(sys.argv[1], {"w": np.ones(2)}, n, keep=5)
    print(newest(sys.argv[1]))
