"""Natural order of pictures; the checkpoints are left alone."""
import os
import re
import sys

import numpy as np
from flax.training import checkpoints


def key(text):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


if __name__ == "__main__":
    pictures = os.path.join(sys.argv[1], "pictures")
    os.makedirs(pictures)
    for n in (2, 10):
        open(os.path.join(pictures, f"p{n}.png"), "w").close()
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    for name in sorted(os.listdir(pictures), key=key)[:1]:
        os.remove(os.path.join(pictures, name))
    print(os.listdir(pictures))
