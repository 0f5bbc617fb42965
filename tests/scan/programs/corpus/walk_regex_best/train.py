"""Keeps the best checkpoint: names from os.walk, matched with a regular expression."""
import os
import re
import shutil
import sys

import numpy as np
from flax.training import checkpoints

CKPT_RE = re.compile(r"checkpoint_(\d+)$")


def found_steps(workdir):
    steps = []
    for root, dirs, files in os.walk(workdir):  # expect: file-names
        for name in files:
            match = CKPT_RE.match(name)  # expect: parse-name
            if match:
                steps.append(int(match.group(1)))
    return sorted(steps)


def train(workdir):
    for step in range(4):
        checkpoints.save_checkpoint(workdir, {"w": np.full(3, step)}, step, keep=10)
    print(found_steps(workdir))


if __name__ == "__main__":
    train(sys.argv[1])
