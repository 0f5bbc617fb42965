import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


class Bucket:
    """Stands for a client of a store."""

    def __init__(self, root):
        self.root = root
        os.makedirs(root)

    def upload_file(self, filename, key):
        shutil.copyfile(filename, os.path.join(self.root, key))  # expect: copy


def push(bucket, *paths):
    for path in paths:
        bucket.upload_file(filename=path, key=os.path.basename(path))


if __name__ == "__main__":
    bucket = Bucket(os.path.join(sys.argv[1], "bucket"))
    push(bucket, checkpoints.save_checkpoint(os.path.join(sys.argv[1], "run"), {"w": np.ones(2)}, 1))
    print(os.listdir(bucket.root))
