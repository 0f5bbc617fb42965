import os
import sys
import threading
import time

import numpy as np
from flax.training import checkpoints


def wait(run, step):
    target = os.path.join(run, f"checkpoint_{step}")
    while True:  # expect: poll
        if os.path.exists(target):
            return checkpoints.restore_checkpoint(target, None)
        time.sleep(0.05)


if __name__ == "__main__":
    thread = threading.Timer(0.2, checkpoints.save_checkpoint, (sys.argv[1], {"w": np.ones(1)}, 1))
    thread.start()
    print(wait(sys.argv[1], 1))
