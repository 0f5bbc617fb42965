import pathlib
import shutil
import sys

import numpy as np
from flax.training import checkpoints


def remove_subfolders(workdir: pathlib.Path):
    for child in workdir.iterdir():
        if not child.is_dir():
            continue
        shutil.rmtree(child)  # expect: remove-folders


if __name__ == "__main__":
    workdir = pathlib.Path(sys.argv[1])
    (workdir / "profile").mkdir()
    checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 1)
    remove_subfolders(workdir)
    print([child.name for child in workdir.iterdir()])
