import sys

import numpy as np
from flax.training import checkpoints


def main(workdir):
    state = checkpoints.restore_checkpoint(workdir, {"w": np.zeros(2), "step": 0})
    for step in range(state["step"], state["step"] + 3):
        state = {"w": state["w"] + 1, "step": step + 1}
    checkpoints.save_checkpoint(workdir, state, state["step"], keep=2)
    return state


if __name__ == "__main__":
    main(sys.argv[1])
    print(main(sys.argv[1]))
