import os
import sys

import numpy as np
from flax.training import checkpoints

from mixins import Rotation


class Summaries(Rotation):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def write(self, n):
        path = os.path.join(self.folder, f"summary_{n}.txt")
        open(path, "w").close()
        self.written.append(path)
        self.rotate(1)


if __name__ == "__main__":
    summaries = Summaries(sys.argv[1])
    for n in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n)
        summaries.write(n)
    print(sorted(os.listdir(sys.argv[1])))
