import os
import sys
import tempfile

import numpy as np
from flax.training import checkpoints


def publish(state, target):
    with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as stage:
        saved = checkpoints.save_checkpoint(stage, state, 0)
        os.replace(saved, target)


if __name__ == "__main__":
    publish({"w": np.ones(2)}, os.path.join(sys.argv[1], "model"))
    print(os.listdir(sys.argv[1]), checkpoints.restore_checkpoint(os.path.join(sys.argv[1], "model"), None))
