import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


def main(workdir):
    folder = Path(workdir)
    state = {"w": np.zeros(2)}
    for step in range(2):
        if any(folder.glob("checkpoint_*")):  # expect: glob
            state = checkpoints.restore_checkpoint(workdir, state)
        state = {"w": state["w"] + 1}
        checkpoints.save_checkpoint(workdir, state, step)
    print(state)


if __name__ == "__main__":
    main(sys.argv[1])
