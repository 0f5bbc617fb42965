import os
import pickle


def size_of(path):
    return os.path.getsize(path)  # expect: size


def describe(path, metrics):
    return {"bytes": size_of(path) > 150, "step": int(path.split("_")[-1]), **metrics}  # expect: parse-name
