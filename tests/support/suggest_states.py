"""Abstract states of known models before and after a change, with what a suggestion has to say about it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def _block(*stack: int) -> dict[str, Any]:
    """A residual block with a layer norm and two dense layers, or a stack of them."""
    # Of nested calls linen numbers the outer one first.
    layers = {"LayerNorm_0": _norm(8), "Dense_1": dense(8, 32), "Dense_0": dense(32, 8)}
    return jax.tree.map(lambda leaf: array(*stack, *leaf.shape), layers)


def layers(scanned: str = "") -> dict[str, Any]:
    """Linen's variables of four blocks between two dense layers, one after the other or scanned."""
    blocks = {scanned: _block(4)} if scanned else {f"layer_{number}": _block() for number in range(4)}
    return {"params": {"first": dense(8, 8), **blocks, "last": dense(8, 3)}}


def linen() -> dict[str, Any]:
    """What `Nnx` has, with linen's names."""
    dense_layers = {"Dense_0": dense(8, 16), "Dense_1": dense(16, 16), "Dense_2": dense(16, 4)}
    params = {"BatchNorm_0": _norm(16), **dense_layers, "LayerNorm_0": _norm(16)}
    return {"params": params, "batch_stats": {"BatchNorm_0": {"mean": array(16), "var": array(16)}}}


def attention(names: tuple[str, ...] = ("query", "key", "value", "out")) -> dict[str, Any]:
    """Linen's variables of four dense layers of one shape."""
    return {"params": {name: dense(8, 8) for name in names}}


def fused() -> dict[str, Any]:
    """Those of attention whose first three layers are one."""
    return {"params": {"out": dense(8, 8), "qkv": dense(8, 24)}}


class Nnx(nnx.Module):
    """What `linen` is, with names of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(8, 16, rngs=rngs)
        self.bn = nnx.BatchNorm(16, rngs=rngs)
        self.fc2 = nnx.Linear(16, 16, rngs=rngs)
        self.ln = nnx.LayerNorm(16, rngs=rngs)
        self.out = nnx.Linear(16, 4, rngs=rngs)


NNX_NAMES = {"fc1": "Dense_0", "bn": "BatchNorm_0", "fc2": "Dense_1", "ln": "LayerNorm_0", "out": "Dense_2"}


def train(variables: dict[str, Any], tx: Any = ADAM) -> dict[str, Any]:
    """The abstract state of a model in training."""
    ordered = jax.tree.map(lambda leaf: leaf, variables)  # the names, as jax orders them
    params = ordered["params"]
    return {"step": 0, "params": params, "opt_state": jax.eval_shape(tx.init, params), **ordered}


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


def _norm(width: int) -> dict[str, Any]:
    return {"scale": array(width), "bias": array(width)}


def array(*shape: int) -> Any:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
