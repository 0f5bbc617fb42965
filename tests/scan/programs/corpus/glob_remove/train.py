import glob
import os
import sys

import numpy as np
from flax.training import checkpoints


class Checkpointer:
    prefix = "ckpt-"

    def __init__(self, folder, max_to_keep=2):
        self.folder = folder
        self.max_to_keep = max_to_keep

    def save(self, state, step):
        checkpoints.save_checkpoint(self.folder, state, step, prefix=self.prefix, keep=1000)
        self._rotate()

    def _rotate(self):
        names = glob.glob(os.path.join(self.folder, f"{self.prefix}*"))  # expect: glob
        names = sorted(names, key=os.path.getmtime)
        while len(names) > self.max_to_keep:
            os.remove(names.pop(0))  # expect: remove


if __name__ == "__main__":
    saver = Checkpointer(sys.argv[1])
    for step in range(4):
        saver.save({"w": np.ones(1)}, step)
    print(len(os.listdir(sys.argv[1])))
