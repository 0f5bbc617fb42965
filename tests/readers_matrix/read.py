"""Run by an old release: restore what `cases` wrote, and compare every value. Needs that release and numpy only.

Prints one line of JSON: [case, way, result], where the result is "", or the reason why it is not what was saved.
"""

import base64
import inspect
import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import flax
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from flax.training import checkpoints
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STEP = "checkpoint_1"


class Leaf(dict):
    """What is known of a saved leaf; for jax, which takes subclasses for leaves, no container."""


def main(root):
    """Restore every case in every way, each in a process of its own: what one reader registers changes the next."""
    for case in sorted(os.listdir(root)):
        folder = os.path.join(root, case)
        with open(os.path.join(folder, "expected.json")) as file:
            expected = json.load(file, object_hook=lambda found: Leaf(found["leaf"]) if "leaf" in found else found)
        for way in ways(folder, None):
            child = os.fork()  # jax has started no threads yet
            if not child:
                report(case, folder, way, expected)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                print(json.dumps([case, way, "the process died"]))


def report(case, folder, way, expected):
    """Restore a case in one way, without and with a target, and print the result."""
    target = jax.tree_util.tree_map(target_leaf, expected)
    problems = [attempt(restore, flattened(expected)) for restore in ways(folder, target)[way]]
    # A reader that needs a target, or its arguments, reads the file too.
    print(json.dumps([case, way, min(problems, key=bool) and problems[-1]]), flush=True)


def ways(folder, target):
    """Return way → functions that restore without and with a target."""
    found = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name == "msgpack":
            found["msgpack"] = [flax_restore(path, False)]
        elif name.startswith("manager"):
            found[name] = [lambda path=path, how=how: manager(path, how) for how in (None, "PyTreeRestore", target)]
        elif name.startswith("orbax"):
            setting = name.split("-")[1]
            found[f"flax-{setting}"] = [flax_restore(path, True), flax_restore(path, True, target)]
            step = os.path.join(path, STEP)
            found[f"pytree-{setting}"] = [
                lambda step=step: ocp.PyTreeCheckpointer().restore(step),
                lambda step=step: ocp.PyTreeCheckpointer().restore(step, item=target, restore_args=arguments(target)),
            ]
            if hasattr(ocp, "StandardCheckpointHandler"):
                found[f"standard-{setting}"] = [
                    lambda step=step: ocp.Checkpointer(ocp.StandardCheckpointHandler()).restore(step),
                    lambda step=step: ocp.Checkpointer(ocp.StandardCheckpointHandler()).restore(step, target),
                ]
    return found


def flax_restore(path, flag, target=None):
    """Return a function that restores with Flax."""

    def restore():
        flax.config.update("flax_use_orbax_checkpointing", flag)
        return checkpoints.restore_checkpoint(path, target, step=1)

    return restore


def arguments(target):
    """Return the arguments of a restore for a target."""
    from orbax.checkpoint import checkpoint_utils

    shardings = jax.tree_util.tree_map(lambda leaf: getattr(leaf, "sharding", None), target)
    return checkpoint_utils.construct_restore_args(target, shardings)


def manager(path, how):
    """Restore the step of a CheckpointManager without arguments, by an argument of that name, or with a target."""
    named = isinstance(how, str)
    # 0.4.4 has arguments, and a manager that takes none.
    if hasattr(ocp, "args") and "item_names" in inspect.signature(ocp.CheckpointManager.__init__).parameters:
        given = {} if how is None else {"args": getattr(ocp.args, how)() if named else ocp.args.StandardRestore(how)}
        return ocp.CheckpointManager(path).restore(1, **given)
    given = {} if how is None or named else {"items": how, "restore_kwargs": {"restore_args": arguments(how)}}
    return ocp.CheckpointManager(path, ocp.PyTreeCheckpointer()).restore(1, **given)


def attempt(restore, expected):
    """Return "", or why the restored tree is not what was saved."""
    try:
        found = flattened(restore())
    except Exception as error:  # whatever an old release raises
        # Without paths of this machine, and TensorStore's specs and source locations.
        text = " ".join(str(error).replace(sys.argv[1], "").split())
        return "{}: {}".format(type(error).__name__, text.split(" [")[0])[:200]
    different = sorted(path for path in expected if path not in found or not equal(expected[path], found[path]))
    return "different: " + ", ".join(different) if different else ""


def flattened(tree, path=""):
    """Return state-dict path → leaf."""
    if isinstance(tree, (list, tuple)):
        tree = {str(index): child for index, child in enumerate(tree)}
    if isinstance(tree, dict) and tree and not isinstance(tree, Leaf):
        return {key: one for name in tree for key, one in flattened(tree[name], path + "/" + str(name)).items()}
    return {path[1:]: tree}


def equal(want, got):
    """Return whether a leaf has the saved value; numbers may be of other types, arrays may not."""
    if "dtype" in want:
        array = np.asarray(got)
        same = array.dtype.name == want["dtype"] and list(array.shape) == want["shape"]
        return same and array.tobytes() == base64.b64decode(want["data"])
    value = want["value"]
    if value is None or value == {}:
        return got is None or got == {}
    if hasattr(got, "dtype"):
        got = got.item()
    return got == value and isinstance(got, type(value))


def target_leaf(one):
    """Return a leaf of the saved type with other values."""
    if "dtype" not in one:
        value = one["value"]
        return value if value is None or value == {} else type(value)()
    array = np.zeros(one["shape"], getattr(ml_dtypes, one["dtype"], one["dtype"]))
    if not one["jax"]:
        return array
    if one["spec"] is None:
        return jax.device_put(array, jax.devices()[0])
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    spec = [tuple(axis) if isinstance(axis, list) else axis for axis in one["spec"]]
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


if __name__ == "__main__":
    main(sys.argv[1])
