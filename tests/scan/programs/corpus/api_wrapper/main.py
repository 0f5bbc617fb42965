import os
import sys

import numpy as np

import ckpt

if __name__ == "__main__":
    for step in range(2):
        ckpt.save(sys.argv[1], {"w": np.full(1, step)}, step)
    print(ckpt.load(sys.argv[1], {"w": np.zeros(1)}), os.path.exists(ckpt.latest(sys.argv[1])))
