import shutil
import sys
from pathlib import Path

import numpy as np
from flax.training import checkpoints


def publish(path: Path):
    shutil.copy(path, path.with_name("published"))  # expect: copy


if __name__ == "__main__":
    publish(Path(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)))
    print(sorted(path.name for path in Path(sys.argv[1]).iterdir()))
