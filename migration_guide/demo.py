"""Train on real data, be killed, and go on across Flax's flag; then compare every bit with Flax's and Orbax's readers.

``python migration_guide/demo.py`` takes about a minute. With ``--workdir DIR`` it is only the training script: an
ordinary one, which imports `flax.training.checkpoints` and goes on from the last checkpoint in DIR.
"""

import argparse
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import serialization, traverse_util
from flax.training import checkpoints, train_state
from sklearn.datasets import load_digits

STEPS, SAVE_EVERY, KILL_AT = 600, 50, 200


class Classifier(nn.Module):
    """Two hidden layers and ten classes."""

    @nn.compact
    def __call__(self, images):
        """Return logits."""
        hidden = nn.relu(nn.Dense(512)(images))
        return nn.Dense(10)(nn.relu(nn.Dense(512)(hidden)))


@jax.jit
def train_step(state, images, labels):
    """Take one step of gradient descent."""

    def loss(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def train(workdir):
    """Train on scikit-learn's digits, save every few steps, and print the accuracy on a fifth of the images."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    test, train = np.split(np.random.default_rng(0).permutation(len(labels)), [len(labels) // 5])
    params = Classifier().init(jax.random.key(0), jnp.zeros((1, 64)))["params"]
    state = train_state.TrainState.create(apply_fn=Classifier().apply, params=params, tx=optax.adam(1e-3))
    state = checkpoints.restore_checkpoint(workdir, state)
    print(f"  begins at step {int(state.step)}", flush=True)
    for step in range(int(state.step), STEPS):
        batch = np.random.default_rng(step).choice(train, 128)
        state = train_step(state, images[batch], labels[batch])
        if (step + 1) % SAVE_EVERY == 0:
            checkpoints.save_checkpoint(workdir, state, step + 1, keep=3, overwrite=True)
            right = state.apply_fn({"params": state.params}, images[test]).argmax(-1) == labels[test]
            print(f"  saved step {step + 1}; accuracy {float(right.mean()):.1%}", flush=True)


def run(workdir, flag, kill_at=None):
    """Run this script through ``flax-ckpt run``, and kill it once it has saved a step."""
    print(f"\n$ FLAX_USE_ORBAX_CHECKPOINTING={flag} flax-ckpt run demo.py --workdir DIR")
    command = [sys.executable, "-m", "flax_ckpt_compat", "run", os.path.abspath(__file__), "--workdir", workdir]
    environment = {**os.environ, "FLAX_USE_ORBAX_CHECKPOINTING": flag}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:  # noqa: S603 - ours
        for line in child.stdout:
            print(line, end="", flush=True)
            if kill_at is not None and line.startswith(f"  saved step {kill_at};"):
                child.kill()
    if child.returncode != (0 if kill_at is None else -signal.SIGKILL):
        sys.exit("The training did not run as planned; nothing was compared.")
    print("  done" if kill_at is None else "  killed")


def leaves(tree):
    """Return key path → array."""
    flat = traverse_util.flatten_dict(serialization.to_state_dict(tree), sep="/")
    return {name: np.asarray(leaf) for name, leaf in flat.items() if leaf is not None}


def compare(workdir):
    """Read each checkpoint with this library and its format's own reader; return whether all bits are the same."""
    import orbax.checkpoint as ocp  # noqa: TID251 - the demo compares with the real Orbax

    import flax_ckpt_compat

    logging.getLogger("absl").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Orbax's, of shardings
    verdicts = []
    for name in sorted(name for name in os.listdir(workdir) if re.fullmatch(r"checkpoint_\d+", name)):
        path = os.path.join(workdir, name)
        if os.path.isdir(path):
            format, expected = "Orbax", ocp.PyTreeCheckpointer().restore(path)
        else:
            with open(path, "rb") as file:
                format, expected = "msgpack", serialization.msgpack_restore(file.read())
        expected, found = leaves(expected), leaves(flax_ckpt_compat.checkpoints.restore_checkpoint(path, None))
        same = expected.keys() == found.keys() and all(
            (leaf.dtype, leaf.shape, leaf.tobytes()) == (found[key].dtype, found[key].shape, found[key].tobytes())
            for key, leaf in expected.items()
        )
        print(f"  {name}  {format:8} {len(found)} leaves  {'bit-identical' if same else 'DIFFERENT'}")
        verdicts.append(same)
    return bool(verdicts) and all(verdicts)


def main():
    """Train, or show the whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=os.path.abspath, help="only train, in this directory")
    if workdir := parser.parse_args().workdir:
        train(workdir)
        return
    with tempfile.TemporaryDirectory(prefix="flax-ckpt-demo-") as folder:
        run(folder, "false", kill_at=KILL_AT)
        same = compare(folder)
        run(folder, "true")
        same &= compare(folder)
    sys.exit(None if same else "NOT IDENTICAL: see above.")


if __name__ == "__main__":
    main()
