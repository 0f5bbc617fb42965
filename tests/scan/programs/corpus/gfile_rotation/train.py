import sys

import numpy as np
import tensorflow as tf
from flax.training import checkpoints


def prune(workdir, keep):
    paths = tf.io.gfile.glob(f"{workdir}/checkpoint_*")  # expect: glob
    for path in sorted(paths, key=lambda p: int(p.rsplit("_", 1)[1]))[:-keep]:  # expect: parse-name
        tf.io.gfile.remove(path)  # expect: remove


if __name__ == "__main__":
    for step in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=9)
    prune(sys.argv[1], 1)
    print(checkpoints.available_steps(sys.argv[1]))
