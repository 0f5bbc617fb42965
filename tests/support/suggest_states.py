"""Abstract states of known models before and after a change, with what a suggestion has to say about it."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


class Block(nn.Module):
    """A residual block, as nn.scan wants it."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        return x + nn.Dense(8)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))), None


class Layers(nn.Module):
    """Four blocks between two dense layers, one after the other or scanned."""

    scanned: str = ""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(8, name="first")(x)
        if self.scanned:
            scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
            x, _ = scan(name=self.scanned)(x, None)
        for number in range(0 if self.scanned else 4):
            x, _ = Block(name=f"layer_{number}")(x)
        return nn.Dense(3, name="last")(x)


class Linen(nn.Module):
    """What ``Nnx`` is, with linen's names."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(16)(x))
        x = nn.LayerNorm()(nn.Dense(16)(x))
        return nn.Dense(4)(x)


class Nnx(nnx.Module):
    """What ``Linen`` is, with names of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(8, 16, rngs=rngs)
        self.bn = nnx.BatchNorm(16, rngs=rngs)
        self.fc2 = nnx.Linear(16, 16, rngs=rngs)
        self.ln = nnx.LayerNorm(16, rngs=rngs)
        self.out = nnx.Linear(16, 4, rngs=rngs)


NNX_NAMES = {"fc1": "Dense_0", "bn": "BatchNorm_0", "fc2": "Dense_1", "ln": "LayerNorm_0", "out": "Dense_2"}


class Attention(nn.Module):
    """Four dense layers of one shape."""

    names: tuple[str, ...] = ("query", "key", "value", "out")

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for name in self.names:
            x = nn.Dense(8, name=name)(x)
        return x


class Fused(nn.Module):
    """Attention whose first three layers are one."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(8, name="out")(nn.Dense(24, name="qkv")(x)[..., :8])


@functools.cache  # many cases are made of the same few
def train(model: nn.Module, tx: Any = ADAM) -> dict[str, Any]:
    """The abstract state of a model in training."""
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 8))))
    params = variables.pop("params")
    return {"step": 0, "params": params, "opt_state": jax.eval_shape(tx.init, params), **variables}


def nnx_state() -> Any:
    """The abstract state of the NNX model."""
    return nnx.state(nnx.eval_shape(lambda: Nnx(nnx.Rngs(0))))


def flax_optim(params: Any, nested: bool) -> dict[str, Any]:
    """A checkpoint as flax.optim's Adam made it, with the parameters below one more ``params`` or not."""
    moments = jax.tree.map(lambda leaf: {"grad_ema": leaf, "grad_sq_ema": leaf}, params)
    target, moments = ({"params": params}, {"params": moments}) if nested else (params, moments)
    return {"optimizer": {"target": target, "state": {"step": 0, "param_states": moments}}}


def dense(rows: int, columns: int) -> dict[str, Any]:
    """The variables of a dense layer."""
    return {"kernel": array(rows, columns), "bias": array(columns)}


def array(*shape: int) -> Any:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
