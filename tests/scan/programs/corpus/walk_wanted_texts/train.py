import os
import sys

import numpy as np
from flax.training import checkpoints

from find import find_all

if __name__ == "__main__":
    checkpoints.save_checkpoint(f"{sys.argv[1]}/run", {"w": np.ones(1)}, 1)
    open(os.path.join(sys.argv[1], "run", "a.csv"), "w").close()
    for path in find_all(sys.argv[1], [".csv", ".tsv"]):
        os.remove(path)
    print(os.listdir(f"{sys.argv[1]}/run"))
