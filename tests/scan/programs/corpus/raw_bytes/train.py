import hashlib
import sys
from pathlib import Path

import numpy as np
from flax import serialization
from flax.training import checkpoints


def params_of(path):
    return serialization.msgpack_restore(Path(path).read_bytes())["w"]  # expect: open


def digest(path):
    with open(path, mode="rb") as file:  # expect: open
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    saved = checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(2)}, 1)
    print(params_of(saved), len(digest(saved)))
