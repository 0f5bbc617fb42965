import json
import os


class Metrics:
    def __init__(self, root):
        self.folder = os.path.join(root, "metrics")
        os.makedirs(self.folder, exist_ok=True)

    def keep(self, step, values):
        for old in os.listdir(self.folder):
            os.remove(os.path.join(self.folder, old))
        with open(os.path.join(self.folder, f"{step}.json"), "w") as f:
            json.dump(values, f)
