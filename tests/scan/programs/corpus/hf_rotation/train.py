"""Rotation as scripts of Hugging Face do it, for directories: here the names are of files."""
import glob
import os
import re
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def sorted_checkpoints(output_dir, prefix="checkpoint"):
    ordering = []
    for path in glob.glob(os.path.join(output_dir, f"{prefix}_*")):  # expect: glob
        match = re.match(f".*{prefix}_([0-9]+)", path)  # expect: parse-name
        if match is not None and match.groups() is not None:
            ordering.append((int(match.groups()[0]), path))
    return [pair[1] for pair in sorted(ordering)]


def rotate(output_dir, save_total_limit):
    found = sorted_checkpoints(output_dir)
    for checkpoint in found[: max(0, len(found) - save_total_limit)]:
        os.remove(checkpoint)  # expect: remove


if __name__ == "__main__":
    for n in range(3):
        checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, n, keep=99)
    rotate(sys.argv[1], 1)
    print(os.listdir(sys.argv[1]))
