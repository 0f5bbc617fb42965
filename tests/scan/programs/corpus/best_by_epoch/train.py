"""The best checkpoint under a name with its epoch; the former best goes."""
import os
import shutil
import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


class Best:
    def __init__(self, run):
        self.run = Path(run)
        self.epoch = None

    def keep(self, path, epoch):
        target = self.run / f"best_{epoch}"
        if os.path.isdir(path):
            shutil.copytree(path, target)
        else:
            shutil.copyfile(path, target)
        if self.epoch is not None:
            (self.run / f"best_{self.epoch}").unlink()  # expect: remove
        self.epoch = epoch


def main(run):
    best = Best(run)
    for epoch in range(3):
        path = checkpoints.save_checkpoint(run, {"w": np.full(2, epoch)}, epoch, keep=9)
        best.keep(path, epoch)
    print(sorted(p.name for p in Path(run).iterdir() if p.name.startswith("best")))  # expect: glob


if __name__ == "__main__":
    main(sys.argv[1])
