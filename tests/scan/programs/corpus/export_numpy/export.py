import os

import numpy as np


def export(params, path):
    np.savez(path, **params)
    return os.path.getsize(path) > 0


def load(path):
    with open(path, "rb") as f:
        return dict(np.load(f))
