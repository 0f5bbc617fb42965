import os
import sys

import numpy as np
from flax.training import checkpoints


def clear(cfg):
    run = cfg["paths"]["run"]
    for step in cfg["drop"]:
        os.remove(os.path.join(run, "checkpoint_%d" % step))  # expect: remove


if __name__ == "__main__":
    cfg = {"paths": {"run": sys.argv[1], "log": sys.argv[1] + "/log"}, "drop": [1]}
    for n in (1, 2):
        checkpoints.save_checkpoint(cfg["paths"]["run"], {"w": np.ones(1)}, n, keep=9)
    clear(cfg)
    print(os.listdir(sys.argv[1]))
