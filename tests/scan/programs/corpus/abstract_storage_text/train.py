import sys

import numpy as np
from flax.training import checkpoints

from storage import Quiet

if __name__ == "__main__":
    storage = Quiet(sys.argv[1])
    path = checkpoints.save_checkpoint(storage.folder, {"w": np.ones(1)}, 1)
    storage.put_text("last", f" {path.rsplit('/', 1)[-1]} ")
    print(storage.get_text("last"))
