from flax.training import checkpoints


class Saver:
    def __init__(self, folder):
        self.folder = folder
        self.path = None

    def save(self, state, step):
        self.path = checkpoints.save_checkpoint(self.folder, state, step)
