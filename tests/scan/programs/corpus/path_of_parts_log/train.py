import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


def load_log(workdir, step):
    return Path(workdir, "logs", f"checkpoint_{step}.log").read_text()


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    Path(sys.argv[1], "logs").mkdir()
    Path(sys.argv[1], "logs", "checkpoint_1.log").write_text("saved")
    print(load_log(sys.argv[1], 1))
