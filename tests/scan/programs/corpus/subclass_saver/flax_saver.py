from flax.training import checkpoints

from base import BaseSaver


class FlaxSaver(BaseSaver):
    def save(self, state, step):
        path = checkpoints.save_checkpoint(self.folder, state, step, keep=99)
        self.history.append(path)
        return path
