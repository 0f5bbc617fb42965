import os
import re
import sys

import numpy as np
from flax.training import checkpoints


def drop_before(folder, limit):
    dropped = []
    with os.scandir(folder) as entries:  # expect: glob
        for entry in entries:
            match = re.match(r"checkpoint_(\d+)", entry.name)  # expect: parse-name
            if match and int(match[1]) < limit:
                os.unlink(entry.path)  # expect: remove
                dropped.append(entry.name)
    return sorted(dropped)


if __name__ == "__main__":
    for step in range(4):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, step, keep=9)
    print(drop_before(sys.argv[1], 2))
