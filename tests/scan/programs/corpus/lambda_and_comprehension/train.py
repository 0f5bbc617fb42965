import os
import sys

import numpy as np
from flax.training import checkpoints

remove_quietly = lambda path: os.remove(path) if os.path.exists(path) else None  # expect: remove

if __name__ == "__main__":
    saved = {n: checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=5) for n in range(3)}
    for n, path in saved.items():
        if n != 2:
            remove_quietly(path)
    print(os.listdir(sys.argv[1]))
