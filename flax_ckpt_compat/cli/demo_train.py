"""Train a classifier on scikit-learn's digits: an ordinary Flax script, without flax_ckpt_compat.

``python demo_train.py --workdir DIR`` resumes from the last checkpoint in DIR.
"""

import argparse
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import checkpoints, train_state
from sklearn.datasets import load_digits

BATCH = 128


class Classifier(nn.Module):
    """MLP with two hidden layers and ten classes."""

    @nn.compact
    def __call__(self, images):
        """Return logits of shape (batch, 10) for images of shape (batch, 64)."""
        hidden = nn.relu(nn.Dense(512)(images))
        hidden = nn.relu(nn.Dense(512)(hidden))
        return nn.Dense(10)(hidden)


def create_state(seed, model=Classifier()):  # noqa: B008 - modules are immutable
    """Create a TrainState with Adam."""
    params = model.init(jax.random.key(seed), jnp.zeros((1, 64)))["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


@jax.jit
def train_step(state, images, labels):
    """Take one step of gradient descent."""

    def loss(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def accuracy(state, images, labels):
    """Return the share of correctly classified images."""
    return float((state.apply_fn({"params": state.params}, images).argmax(-1) == labels).mean())


def load_data():
    """Load images scaled to [0, 1] and labels, split into training data and a fixed fifth for testing."""
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = np.split(order, [len(labels) // 5])
    return (images[train], labels[train]), (images[test], labels[test])


def main():
    """Train, and save every few steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    workdir = os.path.abspath(args.workdir)

    (images, labels), test = load_data()
    state = checkpoints.restore_checkpoint(workdir, create_state(args.seed))
    first = int(state.step)
    for step in range(first, args.steps):
        batch = np.random.default_rng(step).integers(len(labels), size=BATCH)
        state = train_step(state, images[batch], labels[batch])
        if (step + 1) % args.save_every == 0:
            checkpoints.save_checkpoint(workdir, state, step + 1, keep=3, overwrite=True)
            print(json.dumps({"saved": step + 1, "accuracy": accuracy(state, *test)}), flush=True)
    print(json.dumps({"resumed_at": first, "step": int(state.step), "accuracy": accuracy(state, *test)}))


if __name__ == "__main__":
    main()
