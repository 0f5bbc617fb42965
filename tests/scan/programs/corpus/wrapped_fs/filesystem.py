"""The project's own file functions: local disk and buckets behind one name."""
import os
import shutil

from absl import logging


def copy(src, dst, overwrite=False):
    if os.path.exists(dst) and not overwrite:
        raise FileExistsError(dst)
    logging.info("copy %s to %s", src, dst)
    shutil.copyfile(src, dst)  # expect: copy


def remove(path):
    os.remove(path)


def makedirs(path):
    os.makedirs(path, exist_ok=True)
