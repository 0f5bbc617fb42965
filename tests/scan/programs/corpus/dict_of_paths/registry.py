import json
import os


class Registry:
    """Remembers the checkpoint of each epoch."""

    def __init__(self, file):
        self.file = file
        self.paths = {}

    def add(self, epoch, path):
        self.paths[epoch] = path
        with open(self.file, "w") as f:
            json.dump(self.paths, f)

    def forget(self, epoch):
        path = self.paths.pop(epoch)
        os.remove(path)  # expect: remove
