import os
import sys

import numpy as np
from flax.training import checkpoints

import io_utils

if __name__ == "__main__":
    run = os.path.join(sys.argv[1], "run")
    saved = checkpoints.save_checkpoint(run, {"w": np.ones(2)}, 1)
    with open(os.path.join(run, "notes.txt"), "w") as file:
        file.write("first")
    print(io_utils.read_text(os.path.join(run, "notes.txt")))
    io_utils.put(saved, os.path.join(sys.argv[1], "model"))
    print(sorted(os.listdir(sys.argv[1])))
