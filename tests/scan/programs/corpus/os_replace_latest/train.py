import os
import sys

import numpy as np
from flax.training import checkpoints


def publish(path, workdir):
    final = os.path.join(workdir, "final_model")
    os.replace(path, final)
    return final


def load(workdir):
    with open(os.path.join(workdir, "final_model"), "rb") as f:  # expect: open
        return f.read()


if __name__ == "__main__":
    publish(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 1), sys.argv[1])
    print(len(load(sys.argv[1])) > 10)
