import os

from flax.training import checkpoints as ckpt

from .files import delete


class Store:
    def __init__(self, folder, *, limit):
        self.folder, self.limit, self.paths = folder, limit, []

    def add(self, state, step):
        self.paths.append(ckpt.save_checkpoint(self.folder, state, step, keep=1000))
        while len(self.paths) > self.limit:
            delete(self.paths.pop(0))


def names(folder):
    return sorted(os.listdir(folder))
