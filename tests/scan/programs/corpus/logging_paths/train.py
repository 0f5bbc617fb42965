import logging
import os
import sys

import numpy as np
from flax.training import checkpoints

log = logging.getLogger(__name__)


class Timer:
    def __init__(self):
        self.events = []

    def add(self, text):
        self.events.append(text)


if __name__ == "__main__":
    timer = Timer()
    path = checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(1)}, 1)
    log.info("saved %s", path)
    timer.add(f"saved {os.path.basename(path)}")
    print(timer.events, path.endswith("checkpoint_1"), len(path) > 3)
