"""Uploads by a client; the folder form beside the file form."""
import os
import sys

import numpy as np
from flax.training import checkpoints


class Bucket:
    def __init__(self):
        self.names = []

    def upload_folder(self, folder):
        for name in sorted(os.listdir(folder)):
            self.names.append(os.path.basename(folder) + "/" + name)

    def put(self, filename):
        with open(filename, "rb") as f:
            self.names.append((os.path.basename(filename), len(f.read()) > 0))


if __name__ == "__main__":
    workdir = os.path.join(sys.argv[1], "run")
    checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 1)
    with open(os.path.join(workdir, "config.txt"), "w") as f:
        f.write("x")
    bucket = Bucket()
    bucket.upload_folder(workdir)
    bucket.put(os.path.join(workdir, "config.txt"))
    print(bucket.names)
