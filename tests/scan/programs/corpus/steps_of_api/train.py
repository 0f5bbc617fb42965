import sys

import numpy as np
from flax.training import checkpoints


def history(workdir):
    for step in checkpoints.available_steps(workdir):
        yield int(step), checkpoints.restore_checkpoint(workdir, None, step=step)["w"].tolist()


if __name__ == "__main__":
    for n in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.full(1, n)}, n, keep=3)
    print(list(history(sys.argv[1])))
