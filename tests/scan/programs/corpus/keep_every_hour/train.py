import os
import sys

import numpy as np
from flax.training import checkpoints


class Hourly:
    def __init__(self):
        self.last_kept, self.pending = None, None

    def saved(self, path, hour):
        if self.pending and self.last_kept == hour:
            os.remove(self.pending)  # expect: remove
        self.pending, self.last_kept = path, hour


if __name__ == "__main__":
    hourly = Hourly()
    for n, hour in enumerate([0, 0, 1]):
        hourly.saved(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=9), hour)
    print(sorted(os.listdir(sys.argv[1])))
