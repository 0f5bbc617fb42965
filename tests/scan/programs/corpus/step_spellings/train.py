"""One number, in the ways that people write it."""
import os
import pathlib
import re
import sys

import numpy as np
from flax.training import checkpoints


def main(workdir):
    checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, 12)
    path = checkpoints.latest_checkpoint(workdir)
    print(
        int(path.split("_")[-1]),  # expect: parse-name
        int(os.path.basename(path).split("_")[1]),  # expect: parse-name
        int(pathlib.Path(path).name.rpartition("_")[2]),  # expect: parse-name
        int(re.findall(r"\d+", path)[-1]),  # expect: parse-name
        int(path[path.rindex("_") + 1 :]),  # expect: parse-name
        int(os.path.basename(path).removeprefix("checkpoint_")),  # expect: parse-name
        int(os.path.basename(path).replace("checkpoint_", "")),  # expect: parse-name
    )


if __name__ == "__main__":
    main(sys.argv[1])
