import os

from flax.training import checkpoints


class Agent:
    def __init__(self, params):
        self.params = params

    def save(self, directory, step):
        for name, params in self.params.items():
            checkpoints.save_checkpoint(directory, params, step, prefix=f"{name}_", overwrite=True)

    def load(self, directory):
        for name in self.params:
            self.params[name] = checkpoints.restore_checkpoint(directory, self.params[name], prefix=f"{name}_")

    @staticmethod
    def exists(directory):
        return os.path.isdir(directory) and len(os.listdir(directory)) > 0
