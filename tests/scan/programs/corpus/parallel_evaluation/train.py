import multiprocessing.pool
import sys

import numpy as np
from flax.training import checkpoints


def evaluate(path):
    return float(checkpoints.restore_checkpoint(path, None)["w"].sum())


if __name__ == "__main__":
    paths = [checkpoints.save_checkpoint(sys.argv[1], {"w": np.full(2, n)}, n, keep=9) for n in (1, 2)]
    with multiprocessing.pool.ThreadPool(2) as pool:
        print(pool.map(evaluate, paths))
