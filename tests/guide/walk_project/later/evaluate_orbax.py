"""Print the accuracy of weights that real Orbax reads: python evaluate_orbax.py WORKDIR"""

import os
import sys

import orbax.checkpoint as ocp

from model import accuracy, load_data

with ocp.CheckpointManager(os.path.abspath(sys.argv[1])) as manager:
    params = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())
print(f"accuracy {accuracy(params, *load_data()):.2f}")
