import os

from flax.training import checkpoints


class Agent:
    names = ("actor", "critic")

    def save(self, directory, params, step):
        for name in self.names:
            checkpoints.save_checkpoint(directory, params[name], step, prefix=name + "_", overwrite=True)

    def is_complete(self, directory, step):
        return all(os.path.isfile(os.path.join(directory, f"{name}_{step}")) for name in self.names)  # expect: is-file
