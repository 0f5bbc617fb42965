import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from flax.training import checkpoints


def main(workdir):
    saved = [checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, step, keep=9) for step in range(4)]
    *old, _ = saved
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(os.remove, old))  # expect: remove
    print(sorted(os.listdir(workdir)))


if __name__ == "__main__":
    main(sys.argv[1])
