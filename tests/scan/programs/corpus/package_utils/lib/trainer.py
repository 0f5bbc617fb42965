import os

import numpy as np
from flax.training import checkpoints

from .io import save_copy


class Trainer:
    def __init__(self, workdir):
        self.workdir = workdir
        self.last_path = None

    def step(self, n):
        self.last_path = checkpoints.save_checkpoint(self.workdir, {"w": np.full(2, n)}, n)

    def export(self):
        return save_copy(self.last_path, os.path.join(self.workdir, "export"))
