import sys

import numpy as np
from flax.training import checkpoints

import resume

if __name__ == "__main__":
    for step in (9, 10):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=2)
    print(resume.last_step(sys.argv[1]), len(resume.load_raw(sys.argv[1])) > 10)
