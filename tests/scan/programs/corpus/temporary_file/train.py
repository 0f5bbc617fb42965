import os
import sys
import tempfile

import numpy as np
from flax import serialization
from flax.training import checkpoints


def atomic_export(params, path):
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    with os.fdopen(handle, "wb") as f:
        f.write(serialization.to_bytes(params))
    os.replace(temporary, path)
    return os.path.isfile(path), os.path.getsize(path)


if __name__ == "__main__":
    state = {"w": np.ones(1)}
    checkpoints.save_checkpoint(sys.argv[1], state, 1)
    print(atomic_export(state, os.path.join(sys.argv[1], "params.msgpack"))[0])
