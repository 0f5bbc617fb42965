"""As PyTorch's ImageNet example resumes."""
import argparse
import os
import sys

import numpy as np
from flax.training import checkpoints


def main(given):
    parser = argparse.ArgumentParser()
    parser.add_argument("workdir")
    parser.add_argument("--resume", default="", metavar="PATH", help="path to the latest checkpoint")
    args = parser.parse_args(given)
    state = {"w": np.zeros(2)}
    if args.resume:
        if os.path.isfile(args.resume):  # expect: is-file
            state = checkpoints.restore_checkpoint(args.resume, target=state)
            print("loaded")
        else:
            print("no checkpoint found")
    checkpoints.save_checkpoint(args.workdir, {"w": state["w"] + 1}, 1, overwrite=True)
    print(state)


if __name__ == "__main__":
    main(sys.argv[1:])
    main([sys.argv[1], "--resume", "/".join([sys.argv[1], "checkpoint_1"])])
