import json
import os


class Config:
    def __init__(self, directory):
        self.directory = directory

    @property
    def path(self):
        return os.path.join(self.directory, "config.json")

    def write(self, values):
        os.makedirs(self.directory, exist_ok=True)
        with open(self.path, "w") as f:
            json.dump(values, f)

    def read(self):
        with open(self.path) as f:
            return json.load(f)
