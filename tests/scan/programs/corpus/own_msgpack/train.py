"""Parameters in a file of the program's own, states by the API."""
import os
import sys

import numpy as np
from flax import serialization
from flax.training import checkpoints


def save_params(ckpt_path, params):
    with open(ckpt_path, "wb") as f:
        f.write(serialization.to_bytes(params))


def load_params(ckpt_path, params):
    with open(ckpt_path, "rb") as f:
        return serialization.from_bytes(params, f.read())


if __name__ == "__main__":
    workdir = sys.argv[1]
    checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 1)
    save_params(os.path.join(workdir, "params.msgpack"), {"w": np.ones(2)})
    print(load_params(os.path.join(workdir, "params.msgpack"), {"w": np.zeros(2)}))
    os.remove(os.path.join(workdir, "params.msgpack"))
