import re
import sys

import numpy as np
import tensorflow as tf
from flax.training import checkpoints


def latest(root):
    newest = -1
    for folder, subfolders, names in tf.io.gfile.walk(root):  # expect: file-names
        for name in names:
            found = re.search(r"^model_(\d+)$", name)  # expect: parse-name
            if not found:
                continue
            newest = max(newest, int(found.group(1)))
    return newest


def main():
    root = sys.argv[1]
    for run in ("a", "b"):
        for step in (3, 9):
            checkpoints.save_checkpoint(f"{root}/{run}", {"w": np.ones(2)}, step, prefix="model_", keep=3)
    print(latest(root))


if __name__ == "__main__":
    main()
