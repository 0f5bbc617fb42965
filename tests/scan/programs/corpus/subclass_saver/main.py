import os
import sys

import numpy as np

from flax_saver import FlaxSaver

if __name__ == "__main__":
    saver = FlaxSaver(sys.argv[1])
    for step in range(3):
        saver.save({"w": np.ones(2)}, step)
    saver.prune(1)
    print(os.listdir(sys.argv[1]))
