"""A preemption checkpoint goes when the program ends well."""
import contextlib
import os
import sys

import numpy as np
from flax.training import checkpoints


def drop(path):
    os.remove(path)  # expect: remove


def main(workdir):
    with contextlib.ExitStack() as stack:
        path = checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 1, prefix="preempt_")
        stack.callback(drop, path)
    print(os.listdir(workdir))


if __name__ == "__main__":
    main(sys.argv[1])
