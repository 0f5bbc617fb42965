import os
import sys
import zipfile

import numpy as np
from flax.training import checkpoints


def export(path, target):
    with zipfile.ZipFile(target, "w") as archive:
        archive.write(path, os.path.basename(path))  # expect: upload
    with zipfile.ZipFile(target) as archive:
        return sum(one.file_size for one in archive.infolist())


if __name__ == "__main__":
    print(export(checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(200)}, 3), sys.argv[1] + "/x.zip") > 500)
