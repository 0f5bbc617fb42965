import os
import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints

if __name__ == "__main__":
    path = Path(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 1))
    assert path.exists() and path.stat().st_size > 0
    print(os.path.getsize(path) == 0)
