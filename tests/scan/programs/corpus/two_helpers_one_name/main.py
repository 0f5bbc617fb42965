import os
import sys

import numpy as np

from files import Logs
from saver import Saver

if __name__ == "__main__":
    log = os.path.join(sys.argv[1], "log.txt")
    open(log, "w").close()
    logs, saver = Logs(log), Saver(sys.argv[1])
    saver.save({"w": np.ones(1)}, 1)
    logs.remove()
    print(os.listdir(sys.argv[1]), os.path.basename(saver.path))
