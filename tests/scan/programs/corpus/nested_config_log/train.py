import os
import sys

import numpy as np
from flax.training import checkpoints


def clear(cfg):
    if os.path.isfile(cfg["paths"]["log"]):
        os.remove(cfg["paths"]["log"])


if __name__ == "__main__":
    cfg = {"paths": {"run": sys.argv[1], "log": sys.argv[1] + "/log"}}
    open(cfg["paths"]["log"], "w").close()
    checkpoints.save_checkpoint(cfg["paths"]["run"], {"w": np.ones(1)}, 1)
    clear(cfg)
    print(os.listdir(sys.argv[1]))
