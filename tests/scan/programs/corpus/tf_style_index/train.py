"""A text file called checkpoint, as TensorFlow has it, and files whose names begin like checkpoints."""
import json
import os
import sys

import numpy as np
from flax.training import checkpoints


def main(workdir):
    saved = checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, 1)
    index = os.path.join(workdir, "checkpoint")
    with open(index, "w") as file:
        file.write(os.path.basename(saved))
    with open(os.path.join(workdir, "checkpoint_info.json"), "w") as file:
        json.dump({"step": 1}, file)
    with open(index) as file:
        name = file.read()
    with open(os.path.join(workdir, "checkpoint_info.json")) as file:
        print(json.load(file), name, os.path.isfile(index))
    os.remove(index)


if __name__ == "__main__":
    main(sys.argv[1])
