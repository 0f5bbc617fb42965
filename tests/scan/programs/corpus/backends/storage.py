"""A table of functions, by the scheme of the path."""
import os
import shutil

from tensorflow.io import gfile

COPY = {"file": shutil.copyfile, "gs": gfile.copy}


def scheme(path):
    return path.partition("://")[0] if "://" in path else "file"


def copy(source, target):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    COPY[scheme(source)](source, target)  # expect: copy
