import os
import sys

import numpy as np
from flax.training import checkpoints

from mixins import Rotation


class Trainer(Rotation):
    def __init__(self, run):
        self.run = run
        self.written = []

    def step(self, n):
        self.written.append(checkpoints.save_checkpoint(self.run, {"w": np.ones(1)}, n, keep=99))
        self.rotate()


if __name__ == "__main__":
    trainer = Trainer(sys.argv[1])
    for n in range(3):
        trainer.step(n)
    print(os.listdir(sys.argv[1]))
