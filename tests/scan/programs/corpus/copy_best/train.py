"""Copies the best epoch, and removes the copy of the one before."""
import os
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def fit(run, losses):
    best, best_loss = None, float("inf")
    for epoch, loss in enumerate(losses):
        path = checkpoints.save_checkpoint(run, {"w": np.full(2, epoch)}, epoch, keep=2)
        if loss < best_loss:
            copy = shutil.copytree if os.path.isdir(path) else shutil.copy
            copy(path, f"{run}/best_{epoch}")
            if best is not None:
                os.remove(f"{run}/best_{best}")  # expect: remove
            best, best_loss = epoch, loss
    return best


if __name__ == "__main__":
    best = fit(sys.argv[1], [3.0, 2.0, 2.5, 1.0])
    print(best, sorted(name for name in os.listdir(sys.argv[1]) if name.startswith("best_")))  # expect: glob
