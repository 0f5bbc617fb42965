import os
import sys

import numpy as np

from saver import save_and_mirror

if __name__ == "__main__":
    mirror = sys.argv[1] + "/mirror"
    save_and_mirror(ckpt_dir=sys.argv[1] + "/run", target={"w": np.ones(1)}, step=2, mirror=mirror)
    print(os.listdir(mirror))
