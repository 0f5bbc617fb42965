import re
import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


def cleanup(workdir: Path, keep: int = 1):
    pattern = re.compile(r"^checkpoint_(?P<step>\d+)$")
    found = []
    for child in workdir.iterdir():  # expect: glob
        m = pattern.match(child.name)  # expect: parse-name
        if m is None:
            continue
        found.append((int(m["step"]), child))
    for _, path in sorted(found)[:-keep]:
        path.unlink()  # expect: remove


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "notes.txt").write_text("x")
    for step in range(3):
        checkpoints.save_checkpoint(folder, {"w": np.ones(2)}, step, keep=10)
    cleanup(folder)
    print(sorted(path.name for path in folder.iterdir()))
