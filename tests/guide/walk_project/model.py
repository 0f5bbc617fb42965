"""Classifier of 8x8 digits, and its training data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits


class Classifier(nn.Module):
    """MLP with one hidden layer."""

    @nn.compact
    def __call__(self, images):
        hidden = nn.relu(nn.Dense(128)(images))
        return nn.Dense(10)(hidden)


def create_state():
    model = Classifier()
    params = model.init(jax.random.key(0), jnp.zeros((1, 64)))["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


@jax.jit
def train_step(state, images, labels):
    def loss(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def load_data():
    digits = load_digits()
    return (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)


def batch_of(step, images, labels):
    chosen = np.random.default_rng(step).integers(len(labels), size=128)
    return images[chosen], labels[chosen]


def accuracy(params, images, labels):
    logits = Classifier().apply({"params": params}, images)
    return float((logits.argmax(-1) == labels).mean())
