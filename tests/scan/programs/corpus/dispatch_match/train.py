import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def act(command, path):
    match command:
        case "delete":
            os.remove(path)  # expect: remove
        case "archive":
            shutil.make_archive(path + "_archive", "tar", os.path.dirname(path))


if __name__ == "__main__":
    path = checkpoints.save_checkpoint(os.path.join(sys.argv[1], "run"), {"w": np.ones(2)}, 1)
    act("delete", path)
    print(os.path.exists(path))
