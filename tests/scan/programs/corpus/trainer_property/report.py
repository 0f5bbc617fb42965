import os
import sys

import numpy as np

from trainer import Trainer


def describe(trainer):
    return os.stat(trainer.latest).st_size > 5000  # expect: size


if __name__ == "__main__":
    trainer = Trainer(sys.argv[1])
    trainer.save({"w": np.zeros(10000, np.float32)}, 1)
    print(describe(trainer))
