"""Walks a folder of images, matches names, parses labels."""
import os
import re

LABEL = re.compile(r"img_(\d+)_(\d+)\.npy")


def labels(folder):
    found = []
    for root, _, files in os.walk(folder):
        for name in files:
            match = LABEL.match(name)
            if match:
                found.append(int(match.group(2)))
    return sorted(found)


def clear(folder):
    for root, _, files in os.walk(folder):
        for name in files:
            os.remove(os.path.join(root, name))
