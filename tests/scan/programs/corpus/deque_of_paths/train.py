import collections
import contextlib
import os
import sys

import numpy as np
from flax.training import checkpoints

recent = collections.deque()


def keep_recent(path, limit=2):
    recent.append(path)
    while len(recent) > limit:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(recent.popleft())  # expect: remove


if __name__ == "__main__":
    for n in range(4):
        keep_recent(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=99))
    print(sorted(os.listdir(sys.argv[1])))
