"""Reads the names of runs, not of checkpoints: run_3_lr0.1."""
import os


def runs(root):
    found = {}
    for name in os.listdir(root):
        path = os.path.join(root, name)
        if os.path.isdir(path) and name.startswith("run_"):
            found[int(name.split("_")[1])] = path
    return found
