import os
import sys

import numpy as np
from flax.training import checkpoints


def main(workdir):
    with open(os.path.join(workdir, "metrics.tmp"), "w") as file:
        file.write("x")
    checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, 1)
    for name in os.listdir(workdir):
        if name.endswith(".tmp"):
            os.remove(os.path.join(workdir, name))
    print(sorted(os.listdir(workdir)))


if __name__ == "__main__":
    main(sys.argv[1])
