"""Axes that are split and merged, names that hold key paths, rows from any number, parts of optimizers, overlaps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flax_ckpt_compat import errors, restore, rules, save

ADAM = optax.adam(1e-3)


@pytest.fixture(params=["msgpack", "orbax"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Saves a tree in each format, and returns what rules make of it."""

    def made(tree: Any, target: Any, *steps: rules.Rule) -> Any:
        path = save(tmp_path / "x", tree, format=request.param, overwrite=True)
        return restore(path, target, transforms=list(steps))

    return made


def same(found: Any, expected: Any) -> None:
    """The same structure and values."""
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("sizes", [(3, 4), (3, -1), (-1, 4)])
def test_an_axis_becomes_two_and_one_again(sizes: Any, saved: Any) -> None:
    """Values keep their order; axes are counted from either end."""
    whole = np.arange(24.0).reshape(2, 12)
    parts = whole.reshape(2, 3, 4)
    same(saved({"w": whole}, {"w": parts * 0}, rules.split_axis("w", sizes, axis=1)), {"w": parts})
    same(saved({"w": whole}, {"w": parts * 0}, rules.split_axis("w", sizes, axis=-1)), {"w": parts})
    same(saved({"w": parts}, {"w": whole * 0}, rules.merge_axes("w", axis=1)), {"w": whole})
    same(saved({"w": parts}, {"w": np.zeros(24)}, rules.merge_axes("w", count=3)), {"w": np.arange(24.0)})


def test_names_that_hold_key_paths(saved: Any) -> None:
    """Every name becomes levels; below a place alone, where one is given."""
    old = {
        "net": {"layer1.conv.weight": np.ones(2), "layer1.bn.bias": np.zeros(3), "step": np.ones(())},
        "a.b": np.ones(4),
    }
    new = {"layer1": {"conv": {"weight": np.ones(2)}, "bn": {"bias": np.zeros(3)}}, "step": np.ones(())}
    same(saved(old, {"net": new, "a": {"b": np.ones(4)}}, rules.nest(".")), {"net": new, "a": {"b": np.ones(4)}})
    same(saved(old, {"net": new, "a.b": np.ones(4)}, rules.nest(".", at="net")), {"net": new, "a.b": np.ones(4)})
    odd = {"a": {"w_": {"kernel": np.ones(2)}}}
    same(saved({"a__w_": odd["a"]["w_"]}, odd, rules.nest("__")), odd)
    with pytest.raises(errors.NameCollisionError):
        saved({"a.b": np.ones(2), "a": {"b": np.ones(2)}}, {"a": {"b": np.ones(2)}}, rules.nest("."))


def test_rows_that_begin_at_one(saved: Any) -> None:
    """``stack`` and ``unstack`` take the first number; without it, the error says what to pass."""
    row = {f"layer_{n}": {"w": np.full(2, n, np.float32)} for n in (1, 2, 3)}
    whole = {"layers": {"w": np.array([[1, 1], [2, 2], [3, 3]], np.float32)}}
    zeros = jax.tree.map(np.zeros_like, (row, whole))
    same(saved(row, zeros[1], rules.stack(r"layer_(\d+)", "layers", first=1)), whole)
    same(saved(whole, zeros[0], rules.unstack("layers", "layer_{}", first=1)), row)
    with pytest.raises(errors.TransformError, match="from first=0 on"):
        saved(row, zeros[1], rules.stack(r"layer_(\d+)", "layers"))
    with pytest.raises(errors.TransformError, match="from first=2 on"):
        saved(row, zeros[1], rules.stack(r"layer_(\d+)", "layers", first=2))


def filled(params: Any, value: int) -> Any:
    """Adam's state with one value in all moments, and as its count."""
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value, leaf.dtype), ADAM.init(params))


PARTS = {"gen": {"w": jnp.ones((2, 3))}, "disc": {"w": jnp.ones((2, 3))}}


def test_an_optimizer_becomes_two_and_one_again(saved: Any) -> None:
    """Each part takes its moments, although only one of the states has the part's name in them."""
    first, second = filled(PARTS["gen"], 2), filled(PARTS["disc"], 5)
    both = ADAM.init(PARTS)
    moments = {name: {"w": jnp.full((2, 3), value)} for name, value in (("gen", 2.0), ("disc", 5.0))}
    whole = (both[0]._replace(count=jnp.int32(2), mu=moments, nu=moments), *both[1:])
    target = {"opt_gen": ADAM.init(PARTS["gen"]), "opt_disc": ADAM.init(PARTS["disc"])}
    steps = [rules.optimizer_state(f"opt_{name}", "opt_state", name) for name in PARTS]
    found = saved({"opt_state": whole}, target, *steps)
    same([found["opt_gen"][0].mu, found["opt_disc"][0].nu], [first[0].mu, second[0].nu])
    assert found["opt_gen"][0].count == found["opt_disc"][0].count == 2
    steps = [rules.optimizer_state("opt_state", f"opt_{name}", name) for name in PARTS]
    found = saved({"opt_gen": first, "opt_disc": second}, {"opt_state": both}, *steps)
    same(found["opt_state"], whole)


def test_a_part_that_neither_state_has(saved: Any) -> None:
    """It is an error that says so."""
    with pytest.raises(errors.TransformError, match="neither state has net below its moments"):
        saved({"opt": ADAM.init(PARTS)}, {"opt": ADAM.init(PARTS)}, rules.optimizer_state("opt", "opt", "net"))


@pytest.mark.parametrize("step", [7, np.int32(7)])
@pytest.mark.parametrize("stored_at", ["opt_state", "old"])
def test_a_count_is_copied_in_any_order(step: Any, stored_at: str, saved: Any) -> None:
    """Before or after `optimizer_state`, and of a Python number, too."""
    params = {"w": jnp.ones((2, 3))}
    schedule = optax.adam(optax.linear_schedule(0.0, 1e-3, 10))
    target = {"opt_state": schedule.init(params), "step": step * 0}
    steps = [rules.copy("step", "opt_state/1/count"), rules.optimizer_state("opt_state", stored_at)]
    for order in itertools.permutations(steps):
        found = saved({stored_at: filled(params, 3), "step": step}, target, *order)
        assert found["opt_state"][1].count == 7 and found["opt_state"][1].count.dtype == np.int32
        assert found["opt_state"][0].count == 3 and found["step"] == 7
