"""Own retention with etils' paths."""
import sys

import numpy as np
from etils import epath
from flax.training import checkpoints


def rotate(workdir, keep):
    found = [p for p in epath.Path(workdir).iterdir() if p.name.startswith("checkpoint_")]  # expect: glob
    found.sort(key=lambda p: int(p.name.split("_")[-1]))  # expect: parse-name
    for path in found[:-keep]:
        path.unlink()  # expect: remove
    return len(found)


if __name__ == "__main__":
    for step in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=100)
    print(rotate(sys.argv[1], 2))
