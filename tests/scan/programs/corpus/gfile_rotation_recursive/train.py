import sys

import numpy as np
import tensorflow as tf
from flax.training import checkpoints


def prune(workdir, keep):
    for step in checkpoints.available_steps(workdir)[:-keep]:
        path = f"{workdir}/checkpoint_{int(step)}"
        if tf.io.gfile.isdir(path):
            tf.io.gfile.rmtree(path)
        else:
            tf.io.gfile.remove(path)


if __name__ == "__main__":
    for step in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=9)
    prune(sys.argv[1], 1)
    print(checkpoints.available_steps(sys.argv[1]))
