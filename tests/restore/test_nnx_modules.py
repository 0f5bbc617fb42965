"""Modules of nnx as targets are filled in place and returned; real Flax restores into them with its flag on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import checkpoints, plan_restore, restore, save
from flax_ckpt_compat.errors import MissingLeavesError
from tests.support.peers import version
from tests.support.samples import fingerprint
from tests.support.saves import use_flag

# Before, they are leaves of no type that Flax restores into: it returns what is stored.
_needs_pytrees = pytest.mark.skipif(version("flax") < (0, 12), reason="modules are no pytrees in this Flax")


def model(seed: int) -> Any:
    """A layer with weights, running averages and random numbers."""

    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            self.linear, self.norm = nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    return Model(nnx.Rngs(seed))


def same(found: Any, expected: Any) -> None:
    """Assert that two modules have the same state, to the last bit."""
    assert fingerprint(nnx.state(found)) == fingerprint(nnx.state(expected))


@_needs_pytrees
def test_the_state_of_a_module(flag: bool, tmp_path: Path) -> None:
    """It restores into another module, which is returned."""
    saved, target = model(0), model(1)
    checkpoints.save_checkpoint(tmp_path, nnx.state(saved), 1)
    assert checkpoints.restore_checkpoint(tmp_path, target) is target
    same(target, saved)


@_needs_pytrees
def test_a_module_beside_other_leaves(flag: bool, tmp_path: Path) -> None:
    """Also within other containers, and in strict restores and their plans; a bare variable is filled, too."""
    saved, target = model(0), model(1)
    scale = nnx.Param(jnp.zeros(2))
    checkpoints.save_checkpoint(tmp_path, {"model": nnx.state(saved), "scale": nnx.Param(jnp.ones(2)), "step": 3}, 1)
    tree = {"model": target, "scale": scale, "step": 0}
    assert plan_restore(tmp_path, tree).raises is None
    restored = restore(tmp_path, tree)
    assert restored["model"] is target and restored["scale"] is scale and restored["step"] == 3
    same(target, saved)
    assert isinstance(scale[...], jax.Array) and scale[...].tolist() == [1, 1]


@_needs_pytrees
def test_the_variables_of_a_state_are_new(flag: bool, tmp_path: Path) -> None:
    """A state holds the variables of its module, which a restore into the state leaves alone."""
    saved, target = model(0), model(1)
    checkpoints.save_checkpoint(tmp_path, {"state": nnx.state(saved)}, 1)
    restored = restore(tmp_path, {"state": nnx.state(target)})["state"]
    assert fingerprint(restored) == fingerprint(nnx.state(saved))
    same(target, model(1))


def test_what_is_missing_is_an_error(tmp_path: Path) -> None:
    """Nothing of the module is set then."""
    target = model(1)
    before = fingerprint(nnx.state(target))
    checkpoints.save_checkpoint(tmp_path, {"linear": nnx.state(model(0).linear)}, 1)
    with pytest.raises(MissingLeavesError, match="norm/scale/value"):
        restore(tmp_path, target)
    assert fingerprint(nnx.state(target)) == before


@_needs_pytrees
@pytest.mark.parametrize("is_state", [True, False], ids=["state", "module"])
def test_as_real_flax_saves_and_restores(is_state: bool, tmp_path: Path) -> None:
    """What real Flax saved of a module, or its state, restores to what it restores itself."""
    saved, target = model(0), model(1)
    with use_flag(True):
        flax_checkpoints.save_checkpoint(tmp_path, nnx.state(saved) if is_state else saved, 1)
        expected = flax_checkpoints.restore_checkpoint(tmp_path, model(1))
    assert checkpoints.restore_checkpoint(tmp_path, target) is target
    same(target, saved)
    np.testing.assert_array_equal(target.linear.kernel[...], expected.linear.kernel[...])


@_needs_pytrees
@pytest.mark.parametrize("format", ["msgpack", "orbax"])
@pytest.mark.parametrize(
    "made",
    [nnx.Rngs, lambda seed: nnx.Rngs(seed).default, lambda seed: nnx.metrics.Average(), model],
    ids=["Rngs", "RngStream", "Metric", "Module"],
)
def test_whatever_nnx_splits_is_filled(made: Any, format: Any, tmp_path: Path) -> None:
    """The same objects have the new state, in arrays of jax from either format."""
    target = made(1)
    save(tmp_path / "saved", {"state": nnx.state(made(0)), "step": 3}, format=format)
    restored = restore(tmp_path / "saved", {"state": target, "step": 0})
    assert restored["state"] is target and restored["step"] == 3
    same(target, made(0))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(target)))


@_needs_pytrees
def test_a_module_is_as_it_was_if_another_part_of_its_target_raises(tmp_path: Path) -> None:
    """A type's own deserialization may refuse what is stored: then nothing was filled."""

    class Refusing:
        pass

    def refuse(target: Any, state: Any) -> Any:
        raise ValueError("refused")

    serialization.register_serialization_state(Refusing, lambda _: {"w": np.ones(2)}, refuse, override=True)
    target = model(1)
    before = fingerprint(nnx.state(target))
    save(tmp_path / "saved", {"a": nnx.state(model(0)), "z": Refusing()})
    with pytest.raises(ValueError, match="refused"):
        restore(tmp_path / "saved", {"a": target, "z": Refusing()})
    assert fingerprint(nnx.state(target)) == before
