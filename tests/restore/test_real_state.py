"""The state of real models and optimizers, restored into concrete and abstract targets, on both formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from flax_ckpt_compat import checkpoints, restore
from tests.support.real_states import STATES, NnxNet, linen_variables


def plain(leaf: Any) -> Any:
    """A leaf as a numpy array, keys as their data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def assert_same(restored: Any, saved: Any) -> None:
    """The same tree with the same bits."""
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(restored), jax.tree.leaves(saved), strict=True):
        assert getattr(got, "dtype", type(got)) == getattr(want, "dtype", type(want)), path
        assert plain(got).shape == plain(want).shape, path
        assert plain(got).tobytes() == plain(want).tobytes(), path


# What takes longest is to compile the steps that make them.
LIKE_OTHERS = (
    "nnx split",
    "optax masked",
    "optax sgd without momentum",
    "optax accumulated",
    "optax injected",
    "nnx pure dict",
)
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in STATES]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_into_a_concrete_target(flag: bool, tmp_path: Path, name: str) -> None:
    """A freshly made state of other values takes on the saved ones, to the bit."""
    saved = STATES[name]()
    checkpoints.save_checkpoint(tmp_path, saved, 1)
    other = jax.tree.map(lambda x: x if plain(x).dtype == np.uint32 else jnp.zeros_like(x), saved)
    assert_same(checkpoints.restore_checkpoint(tmp_path, other), saved)


@pytest.mark.parametrize("name", NAMES)
def test_into_an_abstract_target(flag: bool, tmp_path: Path, name: str) -> None:
    """What ``jax.eval_shape`` says of a state is target enough; it says that a Python number is an array."""
    saved = STATES[name]()
    checkpoints.save_checkpoint(tmp_path, saved, 1)
    expected = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, int) else leaf, saved)
    assert_same(checkpoints.restore_checkpoint(tmp_path, jax.eval_shape(lambda: saved)), expected)


def test_an_abstract_nnx_model_takes_the_state(flag: bool, tmp_path: Path) -> None:
    """The guide's way: an abstract model is split, its state restored, and the two merged."""
    model = NnxNet(nnx.Rngs(7))
    model.dropout.deterministic = model.norm.use_running_average = True
    checkpoints.save_checkpoint(tmp_path, nnx.state(model), 1)
    abstract = nnx.eval_shape(lambda: NnxNet(nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    restored = nnx.merge(graph, checkpoints.restore_checkpoint(tmp_path, state))
    restored.dropout.deterministic = restored.norm.use_running_average = True
    x = jax.random.normal(jax.random.key(1), (3, 8))
    assert np.array_equal(np.asarray(restored(x)), np.asarray(model(x)))


def test_training_goes_on_where_it_stopped(flag: bool, tmp_path: Path) -> None:
    """A step after the restore is the step that the saved state would have made."""
    saved = STATES["train state"]()
    checkpoints.save_checkpoint(tmp_path, saved, int(saved.step))
    restored = checkpoints.restore_checkpoint(tmp_path, jax.tree.map(lambda x: x * 0, saved))
    # numpy's arithmetic rounds otherwise than JAX's, and Flax's msgpack format restores numpy arrays.
    restored = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, restored)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 0.5), saved.params)
    assert_same(restored.apply_gradients(grads=grads), saved.apply_gradients(grads=grads))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_target_it_is_nested_dicts(flag: bool, tmp_path: Path, name: str) -> None:
    """Nested dicts with JAX's own names of every leaf on the way, and the values of the leaves."""
    saved = STATES[name]()
    checkpoints.save_checkpoint(tmp_path, saved, 1)
    want = {tuple(map(_name, path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(saved)}
    got = dict(_leaves(checkpoints.restore_checkpoint(tmp_path, None)))
    assert got.keys() == want.keys()
    for path, value in want.items():
        assert plain(got[path]).tobytes() == plain(value).tobytes(), path


def _name(key: Any) -> str:
    return str(next(getattr(key, kind) for kind in ("key", "name", "idx") if hasattr(key, kind)))


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(tree, dict):
        for name, child in tree.items():
            yield from _leaves(child, (*path, str(name)))
    elif tree is not None:
        yield path, tree


def test_parameters_alone_out_of_a_train_state(flag: bool, tmp_path: Path) -> None:
    """A target of the parameters only reads them out of the whole training state."""
    saved = STATES["train state"]()
    checkpoints.save_checkpoint(tmp_path, saved, 1)
    restored = checkpoints.restore_checkpoint(tmp_path, {"params": linen_variables()["params"]})
    assert_same(restored, {"params": saved.params})


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
