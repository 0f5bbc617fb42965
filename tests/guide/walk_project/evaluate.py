"""Evaluate the latest checkpoint: python evaluate.py WORKDIR"""

import sys

from flax import serialization
from flax.training import checkpoints

from model import accuracy, load_data

path = checkpoints.latest_checkpoint(sys.argv[1])
with open(path, "rb") as file:
    params = serialization.msgpack_restore(file.read())["params"]
print(f"accuracy {accuracy(params, *load_data()):.2f}")
