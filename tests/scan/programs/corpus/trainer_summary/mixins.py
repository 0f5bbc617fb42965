import os


class Rotation:
    def __init__(self):
        self.written = []

    def rotate(self, limit):
        while len(self.written) > limit:
            os.remove(self.written.pop(0))
