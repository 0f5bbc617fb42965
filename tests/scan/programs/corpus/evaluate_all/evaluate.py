"""Evaluates each checkpoint of a run, in order of time, and skips those that are done."""
import os
import sys


def todo(run, done):
    names = {n for n in os.listdir(run) if os.path.isfile(f"{run}/{n}") and n.startswith("checkpoint_")}  # expect: is-file, glob
    return sorted(names - done)
