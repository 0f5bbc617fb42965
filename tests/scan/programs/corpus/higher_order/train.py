import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from flax.training import checkpoints


def prune(saved, keep):
    list(map(os.remove, saved[:-keep]))  # expect: remove
    return saved[-keep:]


def total(saved):
    with ThreadPoolExecutor() as pool:
        return sum(pool.map(os.path.getsize, saved))  # expect: size


if __name__ == "__main__":
    saved = [checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(99_999)}, n, keep=9) for n in range(3)]
    print(total(saved) > 900_000)
    prune(saved, 1)
    print(os.listdir(sys.argv[1]))
