import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


def load_bytes(workdir, step):
    return Path(workdir, f"checkpoint_{step}").read_bytes()  # expect: open


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    print(len(load_bytes(sys.argv[1], 1)) > 3)
