import os
import sys

import numpy as np
from flax.training import checkpoints

from storage import Folder

if __name__ == "__main__":
    storage = Folder(os.path.join(sys.argv[1], "store"))
    paths = [checkpoints.save_checkpoint(os.path.join(sys.argv[1], "run"), {"w": np.ones(1)}, n, keep=9) for n in (1, 2)]
    storage.put_all(paths)
    print(sorted(os.listdir(storage.folder)))
