import os
import sys

import numpy as np
from flax.training import checkpoints

from names import MODEL_PREFIX, STATE_PREFIX


def save(folder, params, opt_state, step):
    checkpoints.save_checkpoint(folder, params, step, MODEL_PREFIX, overwrite=True)
    checkpoints.save_checkpoint(folder, opt_state, step, prefix=STATE_PREFIX, overwrite=True)


def drop(folder, step):
    for prefix in (MODEL_PREFIX, STATE_PREFIX):
        name = os.path.join(folder, f"{prefix}{step}")
        if os.path.exists(name):
            os.remove(name)  # expect: remove


if __name__ == "__main__":
    save(sys.argv[1], {"a": np.ones(2)}, {"b": np.ones(2)}, 5)
    drop(sys.argv[1], 5)
    print(os.listdir(sys.argv[1]))
