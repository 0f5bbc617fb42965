import os
import pickle
import sys

import numpy as np
from flax.training import checkpoints

from evaluate import load, load_args

if __name__ == "__main__":
    folder = sys.argv[1]
    with open(os.path.join(folder, "args.pkl"), "wb") as file:
        pickle.dump({"lr": 1}, file)
    args = load_args(folder)
    args["checkpoint_path"] = checkpoints.save_checkpoint(folder, {"w": np.ones(2)}, 1)
    print(load(args)["w"], args["lr"])
