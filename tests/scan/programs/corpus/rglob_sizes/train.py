import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


def report(root):
    return {path.name: path.stat().st_size > 50_000 for path in root.rglob("checkpoint_*")}  # expect: glob, size


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for name in "ab":
        checkpoints.save_checkpoint(root / name, {"w": np.ones(99_999)}, 1)
    print(report(root))
