import os
import sys

import numpy as np
from flax.training import checkpoints


class Bucket:
    def __init__(self):
        self.names = []

    def put(self, filename, *, content_type=None):
        with open(filename, mode="rb") as f:  # expect: open
            self.names.append((os.path.basename(filename), len(f.read()) > 0))


class Callback:
    def __init__(self, bucket):
        self.bucket = bucket

    def on_save(self, path, **_):
        self.bucket.put(path, content_type="application/msgpack")


if __name__ == "__main__":
    callbacks = [Callback(Bucket())]
    path = checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    for callback in callbacks:
        callback.on_save(path=path, step=1)
    print(callbacks[0].bucket.names)
