import filecmp
import os
import sys

import numpy as np
from flax.training import checkpoints


def is_same(one, other):
    return filecmp.cmp(one, other, shallow=False)  # expect: open


if __name__ == "__main__":
    paths = [checkpoints.save_checkpoint(os.path.join(sys.argv[1], name), {"w": np.ones(1)}, 1) for name in "ab"]
    print(is_same(*paths))
