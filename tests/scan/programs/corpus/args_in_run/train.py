import argparse
import json
import os
import os.path as osp
import pickle
import sys

import numpy as np
from flax.training import checkpoints


def load(ckpt_path):
    with open(osp.join(ckpt_path, "args"), "rb") as file:
        args = pickle.load(file)
    with open(f"{ckpt_path}/config.json") as file:
        config = json.load(file)
    params = checkpoints.restore_checkpoint(ckpt_path, None)["params"]
    return args, config, params


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("ckpt_path")
    given = parser.parse_args(sys.argv[1:])
    with open(osp.join(given.ckpt_path, "args"), "wb") as out:
        pickle.dump({"lr": 0.1}, out)
    with open(osp.join(given.ckpt_path, "config.json"), "w") as out:
        json.dump({"depth": 2}, out)
    saved = checkpoints.save_checkpoint(given.ckpt_path, {"params": np.ones(2)}, 1)
    with open(osp.join(osp.dirname(saved), "config.json")) as out:
        print(json.load(out))
    args, config, params = load(given.ckpt_path)
    print(args, config, params.sum(), os.path.exists(saved))
