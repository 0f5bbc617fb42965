import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


def main(workdir):
    folder = Path(workdir)
    checkpoints.save_checkpoint(folder, {"w": np.ones(2)}, 1)
    (folder / "log.txt").write_text("x")
    (folder / "images").mkdir()
    print(sorted(p.name for p in folder.iterdir() if p.is_file()))  # expect: only-files


if __name__ == "__main__":
    main(sys.argv[1])
