import subprocess
import sys

import numpy as np
from flax.training import checkpoints

if __name__ == "__main__":
    workdir = sys.argv[1]
    path = checkpoints.save_checkpoint(workdir, {"w": np.ones(2)}, 3)
    subprocess.run(["cp", "-r", path, workdir + "/backup"], check=True)
    subprocess.run(["rm", "-rf", workdir + "/backup"], check=True)
    subprocess.run(f"mv {path} {workdir}/moved", shell=True, check=True)
    print(checkpoints.restore_checkpoint(workdir + "/moved", None))
