"""Checkpoints of all runs of a sweep, by two loops."""
import os


def find(root):
    found = []
    for run in sorted(os.listdir(root)):
        folder = os.path.join(root, run)
        for name in sorted(os.listdir(folder)):  # expect: glob
            if name.startswith("checkpoint_"):
                found.append(os.path.join(folder, name))
    return found
