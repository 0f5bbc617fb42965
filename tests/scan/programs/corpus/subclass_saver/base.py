import os


class BaseSaver:
    def __init__(self, folder):
        self.folder = folder
        self.history = []

    def prune(self, keep):
        while len(self.history) > keep:
            os.remove(self.history.pop(0))  # expect: remove
