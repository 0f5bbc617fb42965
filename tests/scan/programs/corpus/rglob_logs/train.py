import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


def report(root):
    return sorted((path.name, path.stat().st_size) for path in root.rglob("*.log"))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    checkpoints.save_checkpoint(root / "run", {"w": np.ones(1)}, 1)
    (root / "run" / "train.log").write_text("abc")
    print(report(root))
