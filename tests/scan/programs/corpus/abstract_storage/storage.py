import abc
import os
import shutil


class Storage(abc.ABC):
    @abc.abstractmethod
    def put(self, source, name):
        """Store a file."""

    def put_all(self, sources):
        for source in sources:
            self.put(source, os.path.basename(source))


class Folder(Storage):
    def __init__(self, folder):
        self.folder = folder
        os.makedirs(folder)

    def put(self, source, name):
        shutil.copyfile(source, os.path.join(self.folder, name))  # expect: copy
