"""Opens the arguments that a run was started with."""
import os
import os.path as osp
import pickle
import sys

import numpy as np
from flax.training import checkpoints


def load_args(ckpt_path):
    with open(osp.join(ckpt_path, "args"), "rb") as f:
        return pickle.load(f)


def save_args(ckpt_path, args):
    os.makedirs(ckpt_path, exist_ok=True)
    with open(osp.join(ckpt_path, "args"), "wb") as f:
        pickle.dump(args, f)


if __name__ == "__main__":
    ckpt_path = osp.join(sys.argv[1], "run")
    save_args(ckpt_path, {"lr": 0.1})
    checkpoints.save_checkpoint(ckpt_path, {"w": np.ones(1)}, 1)
    print(load_args(ckpt_path), checkpoints.restore_checkpoint(ckpt_path, None)["w"])
