"""Keeps the k best by their scores in a dict."""
import os
import sys

import numpy as np
from flax.training import checkpoints


class TopK:
    def __init__(self, folder, k):
        self.folder, self.k, self.scores = folder, k, {}

    def __call__(self, state, step, score):
        path = checkpoints.save_checkpoint(self.folder, state, step, keep=1000)
        self.scores[path] = score
        if len(self.scores) > self.k:
            worst = min(self.scores, key=self.scores.get)
            os.remove(worst)  # expect: remove
            del self.scores[worst]


if __name__ == "__main__":
    keep = TopK(sys.argv[1], 2)
    for step, score in enumerate([0.1, 0.5, 0.3]):
        keep({"w": np.ones(2)}, step, score)
    print(sorted(map(os.path.basename, keep.scores)))
