import os
import shutil


def remove(path):
    """Remove a checkpoint of either format."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.remove(path)
