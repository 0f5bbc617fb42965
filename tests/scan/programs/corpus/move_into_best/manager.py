import os
import shutil


class BestKeeper:
    """Keeps one copy in a folder of its own."""

    def __init__(self, root):
        self.folder = os.path.join(root, "best")
        os.makedirs(self.folder, exist_ok=True)

    def keep(self, path):
        for old in os.listdir(self.folder):
            os.remove(os.path.join(self.folder, old))  # expect: remove
        shutil.move(path, self.folder)
