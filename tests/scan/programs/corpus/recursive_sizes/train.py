import glob
import os
import sys

import numpy as np
from flax.training import checkpoints


def table(root):
    rows = []
    for path in sorted(glob.glob(f"{root}/**/checkpoint_*", recursive=True)):  # expect: glob
        rows.append((os.path.relpath(path, root), os.path.getsize(path) > 30000))  # expect: size
    return rows


if __name__ == "__main__":
    for run in ("a", "b"):
        checkpoints.save_checkpoint(os.path.join(sys.argv[1], run), {"w": np.zeros(10000, np.float32)}, 1)
    print(table(sys.argv[1]))
