"""Operations by name, chosen in a configuration."""
import os
import shutil


def delete(path):
    os.unlink(path)  # expect: remove


def trash(path):
    shutil.move(path, path + ".trash")


OPERATIONS = {"delete": delete, "trash": trash}
