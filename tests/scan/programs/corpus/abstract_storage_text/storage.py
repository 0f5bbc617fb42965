import os


class Storage:
    def __init__(self, folder):
        self.folder = folder

    def put_text(self, name, text):
        with open(os.path.join(self.folder, name), "w") as f:
            f.write(text)

    def get_text(self, name):
        with open(os.path.join(self.folder, name)) as f:
            return f.read()


class Quiet(Storage):
    def put_text(self, name, text):
        super().put_text(name, text.strip())
