"""Writes and removes a JSON file beside each checkpoint."""
import json
import os
import sys

import numpy as np
from flax.training import checkpoints


def save(workdir, state, step, metrics):
    path = checkpoints.save_checkpoint(workdir, state, step)
    with open(path + ".json", "w") as f:
        json.dump(metrics, f)
    for name in os.listdir(workdir):
        if name.endswith(".json") and name != os.path.basename(path) + ".json":
            os.remove(os.path.join(workdir, name))


def read(workdir, step):
    with open(f"{workdir}/checkpoint_{step}.json") as f:
        return json.load(f)


if __name__ == "__main__":
    for step in range(3):
        save(sys.argv[1], {"w": np.ones(1)}, step, {"loss": step})
    print(read(sys.argv[1], 2), sorted(os.listdir(sys.argv[1])))
