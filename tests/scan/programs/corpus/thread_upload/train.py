import os
import shutil
import sys
import threading

import numpy as np
from flax.training import checkpoints


def upload(path, bucket):
    try:
        shutil.copyfile(path, os.path.join(bucket, os.path.basename(path)))  # expect: copy
    except OSError as error:
        print(type(error).__name__)


if __name__ == "__main__":
    workdir, bucket = sys.argv[1] + "/run", sys.argv[1] + "/bucket"
    os.makedirs(bucket)
    path = checkpoints.save_checkpoint(workdir, {"w": np.ones(1)}, 1)
    thread = threading.Thread(target=upload, args=(path, bucket))
    thread.start()
    thread.join()
    print(os.listdir(bucket))
