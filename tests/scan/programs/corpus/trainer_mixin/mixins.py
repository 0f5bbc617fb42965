import os


class Rotation:
    limit = 1

    def rotate(self):
        while len(self.written) > self.limit:
            self._drop(self.written.pop(0))

    def _drop(self, path):
        try:
            os.remove(path)  # expect: remove
        except FileNotFoundError:
            pass
