"""State that real training scripts save: linen and NNX models, optimizers, and their abstract forms."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.core import FrozenDict
from flax.training.train_state import TrainState

from tests.support.peers import version


class Net(nn.Module):
    """Two layers with batch statistics, in mixed precision."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.Dense(16, param_dtype=jnp.bfloat16, name="hidden")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return nn.Dense(8, name="out")(nn.relu(x))


class StatsState(TrainState):
    """What every image example has."""

    batch_stats: Any = None
    rng: Any = None


@struct.dataclass
class Ema:
    """A dataclass that is not a TrainState, with a static field."""

    params: Any
    decay: float = struct.field(pytree_node=False, default=0.99)


class NnxNet(nnx.Module):
    """The same for NNX, with dropout, whose random state is typed keys."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(16, 8, param_dtype=jnp.bfloat16, rngs=rngs)


def _filled(make: Callable[[], Any]) -> Any:
    """What a program makes, with other values in each array, as after training: to compile it would take seconds."""
    rng = np.random.default_rng(0)

    def fill(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            shape = jax.eval_shape(jax.random.key_data, leaf).shape
            return jax.random.wrap_key_data(jnp.asarray(rng.integers(2**32, size=shape, dtype=np.uint32)))
        return jnp.asarray(rng.uniform(1, 99, leaf.shape).astype(leaf.dtype))

    return jax.tree.map(fill, jax.eval_shape(make))


def linen_variables() -> Any:
    """Parameters and batch statistics of a linen model."""
    return Net().init(jax.random.key(0), jnp.ones((2, 8)))


def _labels(params: Any) -> Any:
    return {name: "frozen" if name == "norm" else "trained" for name in params}


_CHAINS: dict[str, Callable[[], Any]] = {
    "adamw clipped": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 10))
    ),
    "masked": lambda: optax.masked(optax.adam(1e-3), lambda params: {name: name != "norm" for name in params}),
    "multi_transform": lambda: optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.adamw(1e-3)}, _labels
    ),
    "sgd without momentum": lambda: optax.sgd(0.1),
    "accumulated": lambda: optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 4),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
}


def _optax(name: str) -> Any:
    params = linen_variables()["params"]
    return {"params": params, "opt_state": _CHAINS[name]().init(params)}


def _train_state() -> Any:
    def made() -> Any:
        variables, tx = linen_variables(), _CHAINS["adamw clipped"]()
        rest = {"batch_stats": variables["batch_stats"], "rng": jax.random.PRNGKey(3)}
        return StatsState.create(apply_fn=Net().apply, params=variables["params"], tx=tx, **rest)

    return _filled(made).replace(step=1)  # a Python number, of which `jax.eval_shape` makes an array


def _nnx_optimizer() -> Any:
    if version("flax") < (0, 11):
        pytest.skip("nnx.Optimizer before flax 0.11 is called otherwise")

    def made() -> Any:
        model = NnxNet(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    return _filled(made)


def _pure_dict(state: Any) -> Any:
    if not hasattr(nnx, "to_pure_dict"):
        pytest.skip("this Flax has no nnx.to_pure_dict")
    return nnx.to_pure_dict(state)


_MAKERS: dict[str, Callable[[], Any]] = {
    "linen": lambda: _filled(linen_variables),
    "frozen dict": lambda: _filled(lambda: FrozenDict(linen_variables())),
    "train state": _train_state,
    "ema": lambda: _filled(lambda: Ema(linen_variables()["params"])),
    "nnx state": lambda: _filled(lambda: nnx.state(NnxNet(nnx.Rngs(0)))),
    "nnx split": lambda: _filled(lambda: nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)[1:]),
    "nnx pure dict": lambda: _pure_dict(_filled(lambda: nnx.state(NnxNet(nnx.Rngs(0)), nnx.Param))),
    "nnx optimizer": _nnx_optimizer,
    **{f"optax {name}": (lambda name=name: _filled(lambda: _optax(name))) for name in _CHAINS},
}
# Made once: each making traces its program anew.
STATES = {name: functools.cache(make) for name, make in _MAKERS.items()}
