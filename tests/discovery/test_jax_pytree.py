"""Directories of jax's own ``pytree_serialization``; those in the data were written by jax 0.10."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors, rules
from tests.support.layouts import assert_every_function_reads, assert_same
from tests.support.path_kinds import JAX_PYTREE

DATA = Path(__file__).parents[1] / "data" / "layouts" / "jax_0.10"
# Of the files in ``containers``; twelve layers: numbers of leaves are not in the order of their names.
TREE = {
    "layers": [{"w": np.full(2, number, np.float32)} for number in range(12)],
    "pair": (np.zeros((1, 3), np.float32), None),
    "nothing": None,
    "empty": {},
}


class Pair(NamedTuple):
    """A class that jax may be told to save."""

    first: Any
    second: Any


def test_every_function(tmp_path: Path) -> None:
    """It is read by its own path, also by that of the arrays in it."""
    shutil.copytree(DATA / "dicts", tmp_path / "it")
    assert_every_function_reads(tmp_path / "it", JAX_PYTREE, "jax pytree", tmp_path)
    assert_same(flax_ckpt_compat.restore(tmp_path / "it" / "array_store"), JAX_PYTREE)
    assert not flax_ckpt_compat.verify(tmp_path / "it" / "array_store").damaged
    moved = flax_ckpt_compat.restore(
        tmp_path / "it",
        {"kernel": np.zeros((2, 3))},
        transforms=[rules.move("params/dense", "")],
        unused_leaves="ignore",
    )
    assert moved["kernel"].tolist() == JAX_PYTREE["params"]["dense"]["kernel"].tolist()  # type: ignore[index]


def test_containers() -> None:
    """Lists, tuples and None come back as jax had them, and as Flax's dicts where Flax's function asks."""
    found = flax_ckpt_compat.restore(DATA / "containers")
    assert_same(found, TREE)
    assert type(found["pair"]) is tuple
    layers = checkpoints.restore_checkpoint(DATA / "containers", None)["layers"]
    assert [layers[str(number)]["w"].tolist() for number in range(12)] == [[number, number] for number in range(12)]


def test_what_jax_writes_here(tmp_path: Path) -> None:
    """The installed jax writes what is read, classes that it has registered too: their children become tuples."""
    pytest.importorskip("flatbuffers", reason="jax writes the tree with it")
    module = "jax.experimental.array_serialization.pytree_serialization"
    pytree_serialization = pytest.importorskip(module, reason="this release of jax has none")

    pytree_serialization.save(jax.tree.map(jnp.asarray, TREE), tmp_path / "it")
    assert_same(flax_ckpt_compat.restore(tmp_path / "it"), TREE)
    with suppress(ValueError):  # another test of this process registered it
        jax.export.register_namedtuple_serialization(Pair, serialized_name="tests.Pair")
    pytree_serialization.save({"pair": Pair(jnp.ones(2), jnp.zeros(3))}, tmp_path / "pair")
    assert_same(
        flax_ckpt_compat.restore(tmp_path / "pair"), {"pair": (np.ones(2, np.float32), np.zeros(3, np.float32))}
    )


def test_parts_that_are_missing(tmp_path: Path) -> None:
    """Without a part it is something else, which the error names; without the data of an array, that is damaged."""
    shutil.copytree(DATA / "dicts", tmp_path / "it")
    os.rename(tmp_path / "it" / "array_store", tmp_path / "array_store")
    with pytest.raises(errors.CheckpointNotFoundError, match="pytree_serialization"):
        flax_ckpt_compat.restore(tmp_path / "it")
    os.rename(tmp_path / "array_store", tmp_path / "it" / "array_store")
    content = json.loads((tmp_path / "it" / "pytreedef.json").read_text())
    content["__jax_leaf_ids"].append("Array(float32[2])")
    (tmp_path / "it" / "pytreedef.json").write_text(json.dumps(content))
    with pytest.raises(errors.CorruptCheckpointError, match=r"pytreedef\.json"):
        flax_ckpt_compat.restore(tmp_path / "it")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose tree is damaged again and again."""
    folder = tmp_path_factory.mktemp("damaged") / "it"
    shutil.copytree(DATA / "containers", folder)
    return folder


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4), st.integers(0, 2000))
def test_damage(copied: Path, changes: list[tuple[int, int]], length: int) -> None:
    """Whatever the structure says, it is a tree of the arrays that are there, or damage that names the file."""
    content = json.loads((DATA / "containers" / "pytreedef.json").read_text())
    structure = bytearray(base64.b64decode(content["__jax_pytreedef_repr"]))
    for at, value in changes:
        structure[at % len(structure)] = value
    content["__jax_pytreedef_repr"] = base64.b64encode(structure[: length or None]).decode()
    (copied / "pytreedef.json").write_text(json.dumps(content))
    try:
        found: Any = flax_ckpt_compat.restore(copied)
    except errors.CorruptCheckpointError as error:
        assert "pytreedef.json" in str(error)
    else:
        assert len(jax.tree.leaves(found)) <= 13


def test_nodes_that_share_their_children(copied: Path) -> None:
    """A few bytes of such nodes make a tree of 2**40; no more are read than the bytes can hold."""
    # Each is a list of two children, both of them the next one: fields, table, vector (serialization.fbs).
    level, none = (struct.pack("<4HiBxxxI3I", 8, 12, 4, 8, 8, kind, 4, 2, 16, 12) for kind in (3, 1))
    structure = struct.pack("<I", 12) + 40 * level + none
    content = {"__jax_pytreedef_repr": base64.b64encode(structure).decode(), "__jax_leaf_ids": []}
    (copied / "pytreedef.json").write_text(json.dumps(content))
    with pytest.raises(errors.CorruptCheckpointError, match=r"more nodes|2 children"):
        flax_ckpt_compat.restore(copied)
