"""The k best by a metric, in a heap."""
import heapq
import os
import sys

import numpy as np
from flax.training import checkpoints


class TopK:
    def __init__(self, directory, k):
        self.directory, self.k, self.heap = directory, k, []

    def update(self, state, step, score):
        path = checkpoints.save_checkpoint(self.directory, state, step, keep=1000)
        heapq.heappush(self.heap, (score, path))
        if len(self.heap) > self.k:
            _, worst = heapq.heappop(self.heap)
            os.remove(worst)  # expect: remove


if __name__ == "__main__":
    top = TopK(sys.argv[1], 2)
    for step, score in enumerate([0.2, 0.9, 0.5]):
        top.update({"w": np.ones(1)}, step, score)
    print(sorted(os.listdir(sys.argv[1])))
