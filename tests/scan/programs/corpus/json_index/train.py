import os
import sys

import numpy as np
from flax.training import checkpoints

from index import read_index, write_index

if __name__ == "__main__":
    folder = sys.argv[1]
    entries = []
    for step in range(2):
        path = checkpoints.save_checkpoint(folder, {"w": np.ones(100_000)}, step, keep=9)
        entries.append({"step": step, "path": path, "megabytes": os.stat(path).st_size / 2**20})  # expect: size
    write_index(folder, entries)
    print(sum(one["megabytes"] for one in read_index(folder)) > 0.5)
