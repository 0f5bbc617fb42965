"""The API is passed on: as a module that an object keeps, and as a function."""
import functools
import os
import sys

import numpy as np
from flax.training import checkpoints


class Loop:
    def __init__(self, run, save):
        self.run, self.save = run, save
        self.api = checkpoints

    def steps(self, count):
        for n in range(count):
            path = self.save(self.run, {"w": np.ones(1)}, n)
            if n + 1 < count:
                os.remove(path)  # expect: remove
        os.unlink(self.api.latest_checkpoint(self.run))  # expect: remove


if __name__ == "__main__":
    Loop(sys.argv[1], functools.partial(checkpoints.save_checkpoint, keep=9)).steps(2)
    print(os.listdir(sys.argv[1]))
