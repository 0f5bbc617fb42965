import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


def prune(folder, keep=2):
    files = sorted(Path(folder).glob("checkpoint_*"), key=lambda p: p.stat().st_mtime_ns)  # expect: glob
    for file in files[:-keep]:
        file.unlink(missing_ok=True)  # expect: remove
    return len(files)


if __name__ == "__main__":
    for step in range(4):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=9)
    print(prune(sys.argv[1]))
