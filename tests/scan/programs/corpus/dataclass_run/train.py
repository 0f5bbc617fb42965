import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints

from run import Run


def drop(run, step):
    run.checkpoint(step).unlink(missing_ok=True)  # expect: remove
    run.log_file().unlink()


if __name__ == "__main__":
    run = Run(Path(sys.argv[1]))
    checkpoints.save_checkpoint(run.directory, {"w": np.ones(1)}, 3)
    run.log_file().write_text("done")
    drop(run, 3)
    print(sorted(path.name for path in run.directory.iterdir()))
