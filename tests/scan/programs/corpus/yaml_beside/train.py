import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


def main(root):
    run = Path(root, "run")
    run.mkdir()
    (run / "config.yaml").write_text("lr: 0.1\n")
    path = Path(checkpoints.save_checkpoint(run, {"w": np.ones(2)}, 3))
    print((path.parent / "config.yaml").read_text(), path.parent.joinpath("config.yaml").is_file())
    (path.parent / "config.yaml").unlink()


if __name__ == "__main__":
    main(sys.argv[1])
