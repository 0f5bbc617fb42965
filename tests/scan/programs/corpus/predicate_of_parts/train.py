"""Names of a listing go to a list first, and are told apart by a helper."""
import os
import sys

import numpy as np
from flax.training import checkpoints


def is_checkpoint(name):
    head, _, step = name.rpartition("_")
    return head == "checkpoint" and step.isdigit()


def main(workdir):
    for step in range(3):
        checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, step, keep=9)
    with open(f"{workdir}/notes", "w") as file:
        file.write("x")
    names = os.listdir(workdir)  # expect: glob
    old = [name for name in names if is_checkpoint(name)]
    old.sort()
    for name in old[:-1]:
        os.remove(os.path.join(workdir, name))  # expect: remove
    print(sorted(os.listdir(workdir)))


if __name__ == "__main__":
    main(sys.argv[1])
