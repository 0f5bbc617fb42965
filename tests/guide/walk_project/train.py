"""Train on scikit-learn's digits: python train.py WORKDIR STEPS"""

import glob
import os
import sys

import flax
from flax.training import checkpoints

from model import accuracy, batch_of, create_state, load_data, train_step

flax.config.update("flax_use_orbax_checkpointing", False)


def remove_old(workdir, newest):
    """Remove all checkpoints but the newest and each hundredth."""
    for path in glob.glob(os.path.join(workdir, "checkpoint_*")):
        step = int(path.rsplit("_", 1)[1])
        if step < newest and step % 100:
            os.remove(path)


def main(workdir, steps):
    workdir = os.path.abspath(workdir)
    data = load_data()
    state = checkpoints.restore_checkpoint(workdir, create_state())
    print(f"from step {int(state.step)}")
    for step in range(int(state.step), steps):
        state = train_step(state, *batch_of(step, *data))
        if (step + 1) % 50 == 0:
            checkpoints.save_checkpoint(workdir, state, step + 1, keep=100)
            remove_old(workdir, step + 1)
            print(f"step {step + 1}: accuracy {accuracy(state.params, *data):.2f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
