import sys

import numpy as np
from flax.training import checkpoints


def save_all(workdir, generator, discriminator, step):
    for name, state in (("gen_", generator), ("disc_", discriminator)):
        checkpoints.save_checkpoint(workdir, state, step, prefix=name, keep=2)


def restore_all(workdir):
    return [checkpoints.restore_checkpoint(workdir, None, prefix=name) for name in ("gen_", "disc_")]


if __name__ == "__main__":
    for step in range(3):
        save_all(sys.argv[1], {"g": np.full(1, step)}, {"d": np.full(1, step)}, step)
    print(restore_all(sys.argv[1]))
