import argparse
import os
import sys

import numpy as np
from flax.training import checkpoints


def main(given):
    parser = argparse.ArgumentParser()
    parser.add_argument("workdir")
    parser.add_argument("--init", default=None)
    args = parser.parse_args(given)
    state = {"w": np.zeros(2)}
    if args.init is not None and os.path.isdir(args.init):
        state = checkpoints.restore_checkpoint(args.init, state)
    checkpoints.save_checkpoint(args.workdir, {"w": state["w"] + 1}, 1, overwrite=True)
    print(state)


if __name__ == "__main__":
    main(sys.argv[1:])
    main([sys.argv[1], "--init", sys.argv[1]])
