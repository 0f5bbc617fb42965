import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints

from run import Layout

if __name__ == "__main__":
    layout = Layout(Path(sys.argv[1]))
    layout.logs.mkdir()
    for step in range(3):
        checkpoints.save_checkpoint(layout.root, {"w": np.ones(1)}, step)
        layout.log(step).write_text(str(step))
    for path in sorted(layout.logs.glob("step_*.txt"))[:-1]:
        path.unlink()
    print([int(path.stem.split("_")[1]) for path in layout.logs.iterdir()])
