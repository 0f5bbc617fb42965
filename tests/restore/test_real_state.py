"""The state of real models and optimizers, restored into concrete and abstract targets, and modules of nnx in place."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import checkpoints, plan_restore, restore, save
from flax_ckpt_compat.errors import MissingLeavesError
from tests.support.peers import version
from tests.support.real_states import STATES
from tests.support.samples import canonical, fingerprint, nnx_model
from tests.support.saves import use_flag


def assert_same(restored: Any, saved: Any) -> None:
    """The same tree with the same bits."""
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert canonical(restored) == canonical(saved)


LIKE_OTHERS = {"nnx split", "nnx pure dict", *(name for name in STATES if "optax" in name)} - {"optax multi_transform"}
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in STATES]


@pytest.mark.parametrize("name", NAMES)
def test_every_target(flag: bool, tmp_path: Path, name: str) -> None:
    """A freshly made state of other values takes on the saved ones, to the bit, and so does what ``eval_shape`` gives.

    It says that a Python number is an array. Without a target, there are nested dicts with JAX's own names."""
    saved = STATES[name]()
    checkpoints.save_checkpoint(tmp_path, saved, 1)
    other = jax.tree.map(lambda x: jnp.zeros_like(x) if jnp.issubdtype(jnp.result_type(x), jnp.number) else x, saved)
    assert_same(checkpoints.restore_checkpoint(tmp_path, other), saved)
    expected = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, int) else leaf, saved)
    assert_same(checkpoints.restore_checkpoint(tmp_path, jax.eval_shape(lambda: saved)), expected)
    want = {tuple(map(_name, path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(saved)}
    got = dict(_leaves(checkpoints.restore_checkpoint(tmp_path, None)))
    assert canonical(got) == canonical(want)


def _name(key: Any) -> str:
    return str(next(getattr(key, kind) for kind in ("key", "name", "idx") if hasattr(key, kind)))


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(tree, dict):
        for name, child in tree.items():
            yield from _leaves(child, (*path, str(name)))
    elif tree is not None:
        yield path, tree


@pytest.mark.skipif(not hasattr(nnx, "List"), reason="this flax has no nnx.List")
def test_a_module_with_a_list_that_orbax_saved(tmp_path: Path) -> None:
    """Orbax saves it, with children by index beside one by name, and cannot restore it."""

    class Layers(nnx.Module):
        def __init__(self, seed: int) -> None:
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(seed + n)) for n in range(2)])

    saved, target = Layers(1), Layers(5)
    ocp.PyTreeCheckpointer().save(tmp_path / "model", saved)
    assert_same(checkpoints.restore_checkpoint(tmp_path / "model", nnx.state(target)), nnx.state(saved))
    restored = restore(tmp_path / "model", nnx.state(target))
    assert_same(restored, nnx.state(saved))
    found = restore(tmp_path / "model")["layers"]
    np.testing.assert_array_equal(found["1"]["kernel"]["value"], saved.layers[1].kernel[...])


# Before, they are leaves of no type that Flax restores into: it returns what is stored.
_needs_pytrees = pytest.mark.skipif(version("flax") < (0, 12), reason="modules are no pytrees in this Flax")


def same(found: Any, expected: Any) -> None:
    """Assert that two modules have the same state, to the last bit."""
    assert fingerprint(nnx.state(found)) == fingerprint(nnx.state(expected))


@_needs_pytrees
def test_a_module_beside_other_leaves(flag: bool, tmp_path: Path) -> None:
    """Also within other containers, and in strict restores and their plans; a bare variable is filled, too."""
    saved, target = nnx_model(0), nnx_model(1)
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
    saved, target = nnx_model(0), nnx_model(1)
    checkpoints.save_checkpoint(tmp_path, {"state": nnx.state(saved)}, 1)
    restored = restore(tmp_path, {"state": nnx.state(target)})["state"]
    assert fingerprint(restored) == fingerprint(nnx.state(saved))
    same(target, nnx_model(1))


def test_what_is_missing_is_an_error(tmp_path: Path) -> None:
    """Nothing of the module is set then."""
    target = nnx_model(1)
    before = fingerprint(nnx.state(target))
    checkpoints.save_checkpoint(tmp_path, {"linear": nnx.state(nnx_model(0).linear)}, 1)
    with pytest.raises(MissingLeavesError, match="norm/scale/value"):
        restore(tmp_path, target)
    assert fingerprint(nnx.state(target)) == before


@_needs_pytrees
@pytest.mark.parametrize("is_state", [True, False], ids=["state", "module"])
def test_as_real_flax_saves_and_restores(is_state: bool, tmp_path: Path) -> None:
    """What real Flax saved of a module, or its state, restores to what it restores itself."""
    saved, target = nnx_model(0), nnx_model(1)
    with use_flag(True):
        flax_checkpoints.save_checkpoint(tmp_path, nnx.state(saved) if is_state else saved, 1)
        expected = flax_checkpoints.restore_checkpoint(tmp_path, nnx_model(1))
    assert checkpoints.restore_checkpoint(tmp_path, target) is target
    same(target, saved)
    np.testing.assert_array_equal(target.linear.kernel[...], expected.linear.kernel[...])


@_needs_pytrees
@pytest.mark.parametrize(
    "made",
    [nnx.Rngs, lambda seed: nnx.Rngs(seed).default, lambda seed: nnx.metrics.Average(), nnx_model],
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
    target = nnx_model(1)
    before = fingerprint(nnx.state(target))
    save(tmp_path / "saved", {"a": nnx.state(nnx_model(0)), "z": Refusing()})
    with pytest.raises(ValueError, match="refused"):
        restore(tmp_path / "saved", {"a": target, "z": Refusing()})
    assert fingerprint(nnx.state(target)) == before
