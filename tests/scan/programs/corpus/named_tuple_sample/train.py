import os
import sys
from typing import NamedTuple

import numpy as np
from flax.training import checkpoints


class Sample(NamedTuple):
    step: int
    path: str


if __name__ == "__main__":
    samples = []
    for step in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, step)
        file = os.path.join(sys.argv[1], f"sample_{step}.npy")
        np.save(file, np.ones(2))
        samples.append(Sample(step, file))
    for one in samples[:-1]:
        os.remove(one.path)
    print(sorted(os.listdir(sys.argv[1])))
