"""Stored names: what is refused, and where texts lie."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from flax_ckpt_compat._core.errors import NameCollisionError, StorageError, UnsupportedLeafError
from tests.support.orbax_trees import BACKEND, branches, load, save


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": np.ones(2)}, "a.b": np.zeros(2)},
        {"a": {"b": "text"}, "a.b": np.zeros(2)},
        {"l": [1], "l.0": 2},
        {"a": 1, "a/": 2},
        {"": 1, "/": 2},
        {"a": {"": 1}, "a.": 2},
    ],
    ids=repr,
)
def test_two_leaves_with_one_name_are_refused(tmp_path: Path, tree: Any) -> None:
    """Real Orbax loses one of them; we name both, and write nothing."""
    with pytest.raises(NameCollisionError, match="both be stored"):
        save(tmp_path / "c", tree)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("tree", [{"a": np.ones(2), "a/0": np.zeros(3)}, {"a": {"b": None}, "a.b": 1}], ids=repr)
def test_names_that_only_look_alike_are_stored(tmp_path: Path, tree: Any) -> None:
    """A chunk's key is not another array's key, and a marker has no value to lose."""
    restored, real = load(save(tmp_path / "c", tree)), ocp.PyTreeCheckpointer().restore(tmp_path / "c")
    assert str(restored) == str(tree) == str({name: real[name] for name in tree})


def test_a_key_longer_than_the_index_takes(tmp_path: Path) -> None:
    """One that TensorStore stores is restored; a longer one is refused with its name, and not by the disk's space."""
    for size in (65_000, 65_001):
        tree = {"k" * size: np.ones(2)}
        if size == 65_000:
            np.testing.assert_array_equal(load(save(tmp_path / "c", tree))["k" * size], np.ones(2))
        else:
            with pytest.raises(UnsupportedLeafError, match=r"has 65001 bytes.*shorten the keys"):
                save(tmp_path / "d", tree)


class Opaque:
    """A type that no checkpoint knows."""

    def __repr__(self) -> str:
        return "Opaque()"


@pytest.mark.parametrize(
    "leaf",
    [
        Opaque(),
        object,
        {1, 2},
        bytearray(b"x"),
        2**64,
        -(2**63) - 1,
        np.array([None]),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, "V8"),
        np.void(b"abc"),
        np.ma.masked_array([1, 2], [True, False]),
        jax.ShapeDtypeStruct((2,), jnp.float32),
    ],
    ids=repr,
)
def test_what_cannot_be_stored_is_refused_with_its_path(tmp_path: Path, leaf: Any) -> None:
    """Nothing is written, and the message and the attribute name the leaf."""
    with pytest.raises(UnsupportedLeafError, match="outer/0/bad") as caught:
        save(tmp_path / "c", {"outer": [{"bad": leaf}]})
    assert caught.value.leaf == "outer/0/bad"
    assert not (tmp_path / "c").exists()


def test_half_a_surrogate_pair_is_refused_as_a_name() -> None:
    """It has no UTF-8 form."""
    with pytest.raises(UnsupportedLeafError, match="surrogate"):
        BACKEND.prepare(branches({"a\ud800": 1}))


def test_texts_lie_where_real_orbax_looks(tmp_path: Path) -> None:
    """Slashes nest and escapes are resolved, as TensorStore does with a JSON pointer."""
    tree = {"a": {"b": "1"}, "c/d": "2", "x~1y": "3", "q~0r": "4", "": "5"}
    path = Path(save(tmp_path / "c", tree))
    stored = json.loads((path / "_strings.json").read_text())
    assert stored == {"a.b": "1", "c": {"d": "2"}, "x/y": "3", "q~r": "4", "": "5"}
    assert ocp.PyTreeCheckpointer().restore(path) == load(path) == tree


@pytest.mark.parametrize("tree", [{"a": "x", "a/b": "y"}, {"a/b": "x", "a": "y"}, {"~": "x"}, {"~2": "x", "": "y"}])
def test_texts_that_a_pointer_cannot_reach_round_trip(tmp_path: Path, tree: Any) -> None:
    """They are stored as bytes; real Orbax still reads the checkpoint."""
    path = save(tmp_path / "c", tree)
    assert load(path) == tree
    assert set(ocp.PyTreeCheckpointer().restore(path)) == set(tree)


def test_an_existing_directory_is_not_overwritten(tmp_path: Path) -> None:
    """Publishing is the caller's; the writer only ever creates."""
    save(tmp_path / "c", {"a": 1})
    with pytest.raises(StorageError, match=str(tmp_path / "c")):
        save(tmp_path / "c", {"a": 2})
    assert load(tmp_path / "c") == {"a": 1}


def test_a_missing_parent_is_a_storage_error(tmp_path: Path) -> None:
    """The system's error is the cause."""
    with pytest.raises(StorageError) as caught:
        save(tmp_path / "no" / "c", {"a": 1})
    assert isinstance(caught.value.__cause__, OSError)
