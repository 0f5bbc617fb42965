"""A helper that is called `remove`, for logs."""
import os


class Logs:
    def __init__(self, path):
        self.path = path

    def remove(self):
        os.remove(self.path)
