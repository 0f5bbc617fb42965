import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


def main(root):
    run = Path(root) / "run"
    for step in range(2):
        checkpoints.save_checkpoint(run, {"w": np.ones(2)}, step, keep=9)
    latest = Path(checkpoints.latest_checkpoint(run))
    final = run.parent / "final"
    final.write_bytes(latest.read_bytes())  # expect: open
    print(final.stat().st_size > 10)


if __name__ == "__main__":
    main(sys.argv[1])
