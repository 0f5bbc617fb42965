"""Rules for checkpoints of earlier eras: pre-linen names as real Flax has them, and flax.optim's states.

flax.optim is gone; its layout is written down here as its last releases had it. Its Adam and Momentum were optax's.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import checkpoints as flax_checkpoints
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints, restore, rules
from flax_ckpt_compat._core.errors import NameCollisionError, TransformError
from flax_ckpt_compat._core.tree import iter_leaves
from flax_ckpt_compat._trees import state_dict
from tests.support.samples import one_program
from tests.support.stored import applied, count, flat

NAMES = st.one_of(
    st.builds("{}_{}".format, st.sampled_from(["Conv", "Dense", "My_Block", "a-", ""]), st.integers(0, 12)),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=6),
    st.sampled_from(["kernel", "bias", "1", "1.5_2", "Conv_1e3", "Dense_01"]),
)
TREES = st.recursive(st.integers(), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=5), max_leaves=12)


@given(st.dictionaries(NAMES, TREES, min_size=1, max_size=6))
def test_pre_linen_names_are_flaxs(tree: dict[str, Any]) -> None:
    """The names below the path are those that real convert_pre_linen gives, and ours; elsewhere they stay."""
    expected = flat(flax_checkpoints.convert_pre_linen(tree))
    assert flat(checkpoints.convert_pre_linen(tree)) == expected
    whole = {"params": tree, "Dense_7": 1}
    if expected == flat(tree):
        with pytest.raises(TransformError, match="linen's already"):
            applied(whole, rules.pre_linen())
        return
    found = applied(whole, rules.pre_linen())
    assert found.pop("Dense_7") == 1
    assert found == {f"params/{name}": leaf for name, leaf in expected.items()}


def test_pre_linen_elsewhere() -> None:
    """Moments have names of modules, too; the path says which names are meant."""
    tree = {"mu": {"Conv_0": count((1,)), "Dense_1": count((2,))}, "nu": {"Dense_1": count((2,))}}
    assert applied(tree, rules.pre_linen("mu")).keys() == {"mu/Conv_0", "mu/Dense_0", "nu/Dense_1"}
    with pytest.raises(TransformError, match="has no params"):
        applied(tree, rules.pre_linen())


PARAMS = {"Dense_0": {"kernel": count((2, 3)) / 7, "bias": count((3,))}, "temperature": np.float32(2)}
GRADS = [jax.tree.map(lambda leaf, n=n: np.asarray(np.cos(leaf + n), np.float32), PARAMS) for n in range(4)]
RATE = 0.1
ADAM, MOMENTUM = one_program(optax.adam(RATE)), one_program(optax.sgd(RATE, momentum=0.9))
# Field of optax's state → flax.optim's, whose Adam and Momentum keep the same exponential means, sums and steps.
FIELDS = {"mu": "grad_ema", "nu": "grad_sq_ema", "trace": "momentum"}


@functools.cache
def trained(optimizer: Any, steps: int) -> tuple[Any, Any]:
    """Parameters and an optimizer's state after so many steps."""
    params, state = PARAMS, optimizer.init(PARAMS)
    for grads in GRADS[:steps]:
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
    return params, state


def old_state(optimizer: Any) -> dict[str, Any]:
    """``optimizer`` of a checkpoint of flax.optim after three steps."""
    params, (state, *_) = trained(optimizer, 3)
    fields = {FIELDS[name]: getattr(state, name) for name in state._fields if name in FIELDS}
    means = jax.tree.map(lambda *one: dict(zip(fields, one, strict=True)), *fields.values())
    return jax.tree.map(np.asarray, {"target": params, "state": {"step": np.int32(3), "param_states": means}})


def apply(_: Any) -> None:
    """A model that is never called."""


def train_state(optimizer: Any) -> TrainState:
    """Today's state, fresh."""
    return TrainState.create(apply_fn=apply, params=jax.tree.map(jnp.zeros_like, PARAMS), tx=optimizer)


# The old optimizer, today's, and whether all is below one more ``params``.
ERAS: dict[str, tuple[Any, Any, bool]] = {
    "adam": (ADAM, ADAM, False),
    "below params": (ADAM, ADAM, True),
    "chain": (ADAM, optax.chain(optax.clip(1e9), ADAM), False),
    "schedule": (ADAM, one_program(optax.adam(lambda _: RATE)), True),
    "momentum": (MOMENTUM, MOMENTUM, False),
}


@pytest.mark.parametrize("name", ERAS)
def test_training_goes_on_as_it_would_have(name: str, flag: bool, tmp_path: Path) -> None:
    """The next step of today's optimizer from the old checkpoint is the next step of flax.optim's."""
    optimizer, today, is_nested = ERAS[name]
    old = old_state(optimizer)
    if is_nested:
        old = {"target": {"params": old["target"]}, "state": old["state"]}
        old["state"]["param_states"] = {"params": old["state"]["param_states"]}
    checkpoints.save_checkpoint(tmp_path, {"optimizer": old}, 3)
    state = restore(tmp_path, train_state(today), transforms=[rules.pre_optax()])
    assert int(state.step) == 3
    counts = [leaf for path, leaf in flat(serialization.to_state_dict(state.opt_state)).items() if "count" in path]
    assert all(int(leaf) == 3 for leaf in counts)
    after, (expected, _) = state.apply_gradients(grads=GRADS[3]).params, trained(optimizer, 4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), after, expected)


def shown(tree: Any, target: Any) -> set[str]:
    """Names of all leaves after the rule."""
    return set(applied(tree, rules.pre_optax(), target=target))


SMALL = {
    "target": {"params": {"w": count((2,))}, "batch_stats": {"m": count((3,))}},
    "state": {
        "step": np.int32(5),
        "param_states": {"params": {"w": {"grad_ema": count((2,)), "grad_sq_ema": count((2,))}}},
    },
}


W = {"w": jnp.ones(2)}
VARIABLES = {"params": W, "batch_stats": {"m": jnp.ones(3)}}
FACTORED = {name: count((2,)) for name in ("v_row", "v_col", "v", "m")}


def of_w(moments: Any) -> dict[str, Any]:
    """An optimizer of one parameter with these moments."""
    return {"target": {"w": count((2,))}, "state": {"step": np.int32(5), "param_states": {"w": moments}}}


# What is stored and the target → the names of all leaves.
PLACES: dict[str, tuple[Any, Any, str]] = {
    "without a target, where optax.adam in a TrainState has it": (
        {"optimizer": SMALL, "epoch": 1},
        None,
        "params/w batch_stats/m step opt_state/0/mu/w opt_state/0/nu/w opt_state/0/count epoch",
    ),
    "an optimizer saved by itself": (
        SMALL,
        None,
        "params/w batch_stats/m step opt_state/0/mu/w opt_state/0/nu/w opt_state/0/count",
    ),
    "moments, counts and the step are dropped": ({"optimizer": SMALL}, {"params": W}, "params/w batch_stats/m"),
    "of another kind too; EmptyState holds no values, so that it can always be made": (
        {"optimizer": SMALL},
        {"params": W, "step": 0, "opt_state": MOMENTUM.init(W)},
        "params/w batch_stats/m step opt_state/1",
    ),
    "no count without its moments, which would spoil the start": (
        {"optimizer": of_w({"momentum": count((2,))})},
        {"params": W, "step": 0, "opt_state": ADAM.init(W)},
        "params/w step opt_state/1",
    ),
    "today's params are the dict of all collections, and so are the moments": (
        {"optimizer": SMALL},
        {"params": VARIABLES, "opt_state": ADAM.init(VARIABLES)},
        "params/params/w params/batch_stats/m opt_state/0/mu/params/w opt_state/0/nu/params/w opt_state/0/count "
        "opt_state/1",
    ),
    "GradientDescent kept nothing": ({"optimizer": of_w({})}, {"params": W, "step": 0}, "params/w step"),
    "states that optax has no equal of stay, so that they show as unused": (
        {"optimizer": of_w(FACTORED)},
        None,
        "params/w step " + " ".join(f"optimizer/state/param_states/w/{name}" for name in FACTORED),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_where_it_goes(name: str) -> None:
    """Everything has a place, or is dropped as today's state has none of the kind."""
    old, target, names = PLACES[name]
    assert shown(old, target) == set(names.split())


def test_a_step_of_its_own() -> None:
    """A train state's own step stays; the optimizer's goes to the counts only."""
    found = applied({"optimizer": SMALL, "step": 9}, rules.pre_optax())
    assert (found["step"], found["opt_state/0/count"]) == (9, 5)


def test_several_optimizers_today() -> None:
    """Moments go to that of several optimizers that has the parameter."""
    params = {"a": {"w": jnp.ones(2)}, "b": {"w": jnp.ones(2)}}
    optimizer = optax.multi_transform({"x": optax.adam(1.0), "y": optax.adam(2.0)}, {"a": "x", "b": "y"})
    moments = {"grad_ema": count((2,)), "grad_sq_ema": count((2,))}
    old = {"target": params, "state": {"step": np.int32(1), "param_states": {"a": {"w": moments}, "b": {"w": moments}}}}
    old = jax.tree.map(np.asarray, old)
    found = shown({"optimizer": old}, {"params": params, "opt_state": optimizer.init(params)})
    assert {"opt_state/inner_states/x/inner_state/0/mu/a/w", "opt_state/inner_states/y/inner_state/0/nu/b/w"} <= found
    with pytest.raises(
        TransformError,
        match=(r"would fit in opt_state/0/mu, opt_state/1/mu; .*rules\.drop\('optimizer/state/param_states'\)"),
    ):
        target = {
            "params": params,
            "opt_state": (optax.scale_by_adam().init(params), optax.scale_by_adam().init(params)),
        }
        shown({"optimizer": old}, target)


def test_pre_optax_refuses() -> None:
    """A checkpoint without flax.optim's optimizer, and one that has both eras."""
    with pytest.raises(TransformError, match="no optimizer/target"):
        shown({"params": {"w": count((2,))}, "opt_state": {}}, None)
    with pytest.raises(NameCollisionError, match="params/w"):
        shown({"optimizer": SMALL, "params": {"w": count((2,))}}, None)


def test_pre_optax_with_names_before_linen() -> None:
    """The rules of both eras follow one another."""
    names = {"Conv_0": {"kernel": count((2,))}, "Dense_1": {"kernel": count((3,))}}
    moments = jax.tree.map(lambda leaf: {"grad_ema": leaf, "grad_sq_ema": leaf}, names)
    tree = {"optimizer": {"target": names, "state": {"step": np.int32(1), "param_states": moments}}}
    params = {"Conv_0": {"kernel": jnp.ones(2)}, "Dense_0": {"kernel": jnp.ones(3)}}
    target = {"params": params, "opt_state": ADAM.init(params), "step": 0}
    pre_linen = [rules.pre_linen(), rules.pre_linen("opt_state/0/mu"), rules.pre_linen("opt_state/0/nu")]
    found = applied(tree, rules.pre_optax(), *pre_linen, target=target)
    assert found.keys() == {"/".join(path) for path, _ in iter_leaves(state_dict.describe(target))}
