import os

from flax.training import checkpoints


class Trainer:
    def __init__(self, folder):
        self._folder = os.path.abspath(folder)

    @property
    def latest(self):
        return checkpoints.latest_checkpoint(self._folder)

    def save(self, state, step):
        return checkpoints.save_checkpoint(self._folder, state, step, keep=2, overwrite=True)
