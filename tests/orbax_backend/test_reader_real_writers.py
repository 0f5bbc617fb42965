"""What real Orbax writes, read by us."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax_ckpt_compat.orbax_backend import open_index

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.location import location_of
from tests.orbax_backend.conftest import WRITERS, pytree
from tests.support.logs import warnings_logged
from tests.support.orbax_trees import BACKEND, handles, load, on_host
from tests.support.peers import needs
from tests.support.trees import fingerprint


@pytest.mark.parametrize("writer", WRITERS)
def test_reads_what_real_orbax_writes(tmp_path: Path, common_tree: dict[str, Any], writer: str) -> None:
    """Every layout that the current release writes gives the saved values, dtypes, shapes and types."""
    path = WRITERS[writer](tmp_path / "c", common_tree)
    assert fingerprint(load(path)) == fingerprint(on_host(common_tree))


def test_reads_standard_checkpointer(tmp_path: Path) -> None:
    """StandardCheckpointer's directories, which hold no text."""
    tree = {"a": jnp.arange(5.0), "n": np.arange(3), "i": 3, "l": [1.5, None], "t": {"b": True}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", tree)
    assert fingerprint(load(tmp_path / "c")) == fingerprint(on_host(tree))


def test_reads_numpy_scalars(tmp_path: Path) -> None:
    """Numpy scalars come back as saved, but for 64 bits, which are stored just as Python numbers are."""
    narrow = {"i": np.int16(3), "f": np.float32(1.5), "c": np.complex64(1j)}
    path = pytree()(tmp_path / "c", narrow | {"wide": np.int64(3), "double": np.float64(2.5)})
    assert fingerprint(load(path)) == fingerprint(narrow | {"wide": 3, "double": 2.5})
    assert load(path) == ocp.PyTreeCheckpointer().restore(path)


@needs("orbax-checkpoint", 0, 12, why="cannot save a bare jax array")
def test_reads_a_bare_leaf(tmp_path: Path) -> None:
    """A tree of one leaf, stored under the empty name."""
    path = pytree()(tmp_path / "c", jnp.arange(4.0))
    assert fingerprint(load(path)) == fingerprint(np.arange(4, dtype=np.float32))


def test_reads_long_lists_in_order(tmp_path: Path) -> None:
    """Ten comes after nine, whatever the names sort like."""
    path = pytree()(tmp_path / "c", {"l": list(range(12))})
    assert load(path) == {"l": list(range(12))}


@pytest.mark.parametrize("item", ["flat", "step"])
def test_a_single_array_is_a_bare_leaf(tmp_path: Path, item: str) -> None:
    """An item that its step, or the directory itself, declares to be one array has no key ``checkpoint``."""
    values = jnp.arange(5)
    if item == "flat":
        ocp.Checkpointer(ocp.ArrayCheckpointHandler()).save(tmp_path / "c", args=ocp.args.ArraySave(values))
        path = tmp_path / "c"
    else:
        with ocp.CheckpointManager(tmp_path / "c") as manager:
            manager.save(1, args=ocp.args.Composite(arr=ocp.args.ArraySave(values)))
        path = tmp_path / "c" / "1" / "arr"
    assert fingerprint(load(path)) == fingerprint(np.arange(5, dtype=np.int32))


def test_a_tree_with_the_key_checkpoint_stays_a_tree(tmp_path: Path) -> None:
    """Only a declared single array loses its key."""
    path = pytree(use_ocdbt=False)(tmp_path / "c", {"checkpoint": jnp.arange(5)})
    assert list(load(path)) == ["checkpoint"]


@pytest.mark.parametrize("writer", ["v0", "zarr3"])
def test_compressed_chunks_as_long_as_their_arrays(tmp_path: Path, writer: str) -> None:
    """Their bytes lie in the database like those of small arrays, and are not the arrays' own: Orbax compresses."""
    tree = {f"a{length}": np.ones(length, np.uint8) for length in range(10, 40)}
    path = WRITERS[writer](tmp_path / "c", tree)
    index = open_index.open_database(location_of(path))
    chunks = {name: index.get(f"{name}/c/0" if writer == "zarr3" else f"{name}/0") for name in tree}
    assert any(len(chunk or b"") == tree[name].nbytes for name, chunk in chunks.items())
    assert fingerprint(load(path)) == fingerprint(tree)


def test_kinds_without_reading(tmp_path: Path, common_tree: dict[str, Any]) -> None:
    """Opening what real Orbax wrote tells kinds, and typed keys from arrays."""
    found = handles(WRITERS["v1"](tmp_path / "c", common_tree))
    kinds = {name: found[name].kind for name in ("key", "keys", "raw_key", "step", "rate", "on", "name", "big")}
    assert kinds == {
        "key": LeafKind.PRNG_KEY,
        "keys": LeafKind.PRNG_KEY,
        "raw_key": LeafKind.ARRAY,
        "step": LeafKind.INT,
        "rate": LeafKind.FLOAT,
        "on": LeafKind.BOOL,
        "name": LeafKind.STR,
        "big": LeafKind.ARRAY,
    }
    assert (found["keys"].shape, found["keys"].dtype) == ((3, 4), np.dtype(np.uint32))


def test_leaves_of_two_names_in_one_place_are_told(tmp_path: Path) -> None:
    """Real Orbax keeps one of two colliding values; the reader says so."""
    path = pytree()(tmp_path / "c", {"a": {"b": np.ones(2)}, "a.b": np.ones(2)})
    with warnings_logged() as logged:
        reader = BACKEND.open(location_of(path))
    assert len(logged) == 1 and "a.b" in logged[0]
    assert isinstance(reader.tree.children["a.b"], LeafHandle)
