import pickle
import sys

import numpy as np
from flax import serialization
from flax.training import checkpoints


def norm(path):
    state = serialization.msgpack_restore(open(path, "rb").read())  # expect: open
    return float(np.linalg.norm(state["w"]))


def main(workdir):
    first = checkpoints.save_checkpoint(workdir, {"w": np.ones(4)}, 1, keep=2)
    second = checkpoints.save_checkpoint(workdir, {"w": np.ones(9)}, 2, keep=2)
    for name, path in {"first": first, "second": second}.items():
        print(name, norm(path))


if __name__ == "__main__":
    main(sys.argv[1])
