"""Train on scikit-learn's digits: python train_orbax.py WORKDIR STEPS"""

import os
import sys

import jax
import orbax.checkpoint as ocp

from model import accuracy, batch_of, create_state, load_data, train_step


def abstract(leaf):
    """Describe a leaf to restore; the state's arrays may be on any devices."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) if hasattr(leaf, "shape") else leaf


def main(workdir, steps):
    workdir = os.path.abspath(workdir)
    data = load_data()
    state = create_state()
    options = ocp.CheckpointManagerOptions(max_to_keep=1, keep_period=100)
    with ocp.CheckpointManager(workdir, options=options) as manager:
        if manager.latest_step() is not None:
            target = ocp.args.StandardRestore(jax.tree.map(abstract, state))
            state = manager.restore(manager.latest_step(), args=target)
        print(f"from step {int(state.step)}")
        for step in range(int(state.step), steps):
            state = train_step(state, *batch_of(step, *data))
            if (step + 1) % 50 == 0:
                manager.save(step + 1, args=ocp.args.StandardSave(state))
                print(f"step {step + 1}: accuracy {accuracy(state.params, *data):.2f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
