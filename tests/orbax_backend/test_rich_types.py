"""Tuples and namedtuples that Orbax records with ``support_rich_types``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from tests.support.peers import needs

pytestmark = needs("orbax-checkpoint", 0, 11, 10, why="has no rich types")


class Pair(NamedTuple):
    """Fields that are not in the order of the alphabet."""

    second: Any
    first: Any


TREE = {
    "tuple": (np.ones(2), 3),
    "pair": Pair(np.ones(1), {"inner": (1, [2, (3,)])}),
    "list": [np.zeros(1), ()],
    "opt": optax.adam(1e-3).init({"w": np.ones(2, np.float32)}),
    # Names that the format uses itself.
    "category": {"category": {"clazz": (1,)}, "entries": [2]},
}


def rich(path: Path, tree: Any) -> tuple[Path, Any]:
    """A directory as Orbax writes it when it is told to record types, and what it restores."""
    from orbax.checkpoint._src.metadata import pytree_metadata_options

    options = pytree_metadata_options.PyTreeMetadataOptions(support_rich_types=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(pytree_metadata_options=options)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
        theirs = checkpointer.restore(path)
    return path, theirs


def shape(tree: Any) -> Any:
    """The containers of a tree: a namedtuple by its fields."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return "namedtuple", [(name, shape(child)) for name, child in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, dict):
        return {name: shape(child) for name, child in tree.items()}
    return type(tree), [shape(child) for child in tree] if isinstance(tree, list | tuple) else tree is None


def test_stored_structure(tmp_path: Path) -> None:
    """Those of real Orbax, but for empty namedtuples; the names of the classes are theirs."""
    path, theirs = rich(tmp_path / "saved", TREE)
    ours = flax_ckpt_compat.restore(path)
    assert isinstance(theirs["opt"], tuple) and isinstance(theirs["pair"], tuple)
    for name in ("tuple", "pair", "list", "category"):
        assert shape(jax.tree.map(np.asarray, ours[name])) == shape(jax.tree.map(np.asarray, theirs[name]))
    assert (ours["pair"]._fields, type(ours["pair"]).__name__) == (("second", "first"), "Pair")
    assert (ours["opt"][0]._fields, type(ours["opt"][0]).__name__) == (("count", "mu", "nu"), "ScaleByAdamState")
    assert ours["pair"].first == {"inner": (1, [2, (3,)])}
    np.testing.assert_array_equal(ours["opt"][0].mu["w"], np.zeros(2))
    with flax_ckpt_compat.open_checkpoint(path) as view:
        assert view.tree["pair"].second.shape == (1,)


def test_other_structures_are_as_before(tmp_path: Path) -> None:
    """Flax's is of dicts; a target has its own types; a conversion keeps those recorded."""
    path, _ = rich(tmp_path / "saved", TREE)
    assert checkpoints.restore_checkpoint(path, None)["pair"]["first"] == {
        "inner": {"0": 1, "1": {"0": 2, "1": {"0": 3}}}
    }
    found = flax_ckpt_compat.restore(path, TREE)
    assert jax.tree.structure(found) == jax.tree.structure(TREE)
    flax_ckpt_compat.convert(path, tmp_path / "copy", "orbax")
    again = flax_ckpt_compat.restore(tmp_path / "copy")
    assert again["tuple"][1] == 3 and isinstance(again["tuple"], tuple)
    assert again["pair"]._fields == ("second", "first")


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, '{"category": "namedtuple"}', '{"category": "custom"}', 3, "null"]
)
def test_what_does_not_decode_is_not_recorded(tmp_path: Path, text: Any) -> None:
    """The tree is told by its entries all the same."""
    path, _ = rich(tmp_path / "saved", {"a": (1, 2)})
    metadata = json.loads((path / "_METADATA").read_text())
    metadata["value_metadata_tree"] = text
    (path / "_METADATA").write_text(json.dumps(metadata))
    assert flax_ckpt_compat.restore(path) == {"a": [1, 2]}
