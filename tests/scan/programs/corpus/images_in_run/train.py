import glob
import os
import sys

import numpy as np
from flax.training import checkpoints


def main(workdir):
    os.makedirs(f"{workdir}/samples")
    for step in range(2):
        checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, step)
        np.save(f"{workdir}/samples/step_{step}.npy", np.ones(2))
    for path in glob.glob(f"{workdir}/samples/*.npy"):
        if int(path.split("_")[-1].removesuffix(".npy")) < 1:
            os.remove(path)
    print(os.listdir(f"{workdir}/samples"))


if __name__ == "__main__":
    main(sys.argv[1])
