import json
import sys

import numpy as np
import tensorflow as tf
from flax.training import checkpoints

gfile = tf.io.gfile


def write(workdir, step, values):
    name = gfile.join(workdir, f"metrics_{step}.json")
    with gfile.GFile(name, "w") as f:
        json.dump(values, f)
    with gfile.GFile(name, "r") as f:
        return json.load(f)


if __name__ == "__main__":
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    print(write(sys.argv[1], 1, {"loss": 1.5}), gfile.exists(sys.argv[1] + "/checkpoint_1"))
