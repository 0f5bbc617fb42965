import os
import pickle

from flax import serialization


def load(args):
    target = {"w": None}
    with open(args["checkpoint_path"], "rb") as file:  # expect: open
        return serialization.from_bytes(target, file.read())


def load_args(folder):
    with open(os.path.join(folder, "args.pkl"), "rb") as file:
        return pickle.load(file)
