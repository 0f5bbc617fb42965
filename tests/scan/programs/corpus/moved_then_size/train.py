import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def release(path, version):
    final = shutil.move(path, f"{os.path.dirname(path)}/release-{version}")
    return os.path.getsize(final) > 100_000  # expect: size


if __name__ == "__main__":
    print(release(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(99_999)}, 1), "v2"))
