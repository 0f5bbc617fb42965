"""A step of real training, for GPUs: GPT-2 on random tokens, the gradient of its loss, and adamw."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

_HEAD = 64  # elements of each head of attention
_BATCH = 8


def training_step(state: TrainState) -> Callable[[TrainState], TrainState]:
    """Return a function that trains a state of workload ``gpt2+adamw`` for one step; the state is donated to it."""
    parameters: Any = state.params["transformer"]
    vocabulary, positions = len(parameters["wte"]["embedding"]), len(parameters["wpe"]["embedding"])
    tokens = jax.device_put(np.random.default_rng(0).integers(0, vocabulary, (_BATCH, positions), np.int32))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, tokens: jax.Array) -> TrainState:
        return state.apply_gradients(grads=jax.grad(_loss)(state.params, tokens))

    return lambda state: jax.block_until_ready(step(state, tokens))


def _loss(parameters: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of each next token; matrices are multiplied in bfloat16."""
    tree = parameters["transformer"]
    embedding = tree["wte"]["embedding"]
    x = embedding[tokens] + tree["wpe"]["embedding"][: tokens.shape[1]]
    for number in range(len(tree["h"])):
        layer = tree["h"][str(number)]
        x += _attention(layer["attn"], _normalized(layer["ln_1"], x))
        hidden = jax.nn.gelu(_dense(layer["mlp"]["c_fc"], _normalized(layer["ln_2"], x)))
        x += _dense(layer["mlp"]["c_proj"], hidden)
    logits = _product(_normalized(tree["ln_f"], x), embedding.T)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def _attention(layer: Any, x: jax.Array) -> jax.Array:
    batch, length, width = x.shape
    parts = _dense(layer["c_attn"], x).reshape(batch, length, 3, width // _HEAD, _HEAD).astype(jnp.bfloat16)
    query, key, value = (parts[:, :, number] for number in range(3))
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return _dense(layer["c_proj"], mixed.reshape(batch, length, width))


def _normalized(layer: Any, x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x) * layer["scale"] + layer["bias"]


def _dense(layer: Any, x: jax.Array) -> jax.Array:
    return _product(x, layer["kernel"]) + layer["bias"]


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.matmul(x.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
