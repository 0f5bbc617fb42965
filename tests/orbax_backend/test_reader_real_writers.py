"""What real Orbax writes, read by us."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import open_index

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import KeyData
from tests.support.interpreters import devices, run_python
from tests.support.logs import warnings_logged
from tests.support.orbax_trees import BACKEND, handles, load, on_host
from tests.support.peers import needs, ocp_v1, pytree_handler, skip_without_typed_keys
from tests.support.trees import fingerprint


def _pytree(**options: Any) -> Callable[[Path, Any], Path]:
    def write(path: Path, tree: Any) -> Path:
        ocp.Checkpointer(pytree_handler(**options)).save(path, args=ocp.args.PyTreeSave(tree))
        return path

    return write


def _manager(path: Path, tree: Any) -> Path:
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.PyTreeSave(tree))
    return path / "3" / "default"


def _v1(path: Path, tree: Any) -> Path:
    ocp_v1.save(path, tree)
    return path / "state"


WRITERS: dict[str, Callable[[Path, Any], Path]] = {
    "v0": _pytree(),
    "zarr3": _pytree(use_zarr3=True),
    "files": _pytree(use_ocdbt=False),
    "files zarr3": _pytree(use_ocdbt=False, use_zarr3=True),
    "uncompressed": _pytree(use_compression=False),
    "uncompressed files": _pytree(use_ocdbt=False, use_compression=False),
    "manager": _manager,
    "v1": _v1,
}


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
    path = _pytree()(tmp_path / "c", narrow | {"wide": np.int64(3), "double": np.float64(2.5)})
    assert fingerprint(load(path)) == fingerprint(narrow | {"wide": 3, "double": 2.5})
    assert load(path) == ocp.PyTreeCheckpointer().restore(path)


@needs("orbax-checkpoint", 0, 12, why="cannot save a bare jax array")
def test_reads_a_bare_leaf(tmp_path: Path) -> None:
    """A tree of one leaf, stored under the empty name."""
    path = _pytree()(tmp_path / "c", jnp.arange(4.0))
    assert fingerprint(load(path)) == fingerprint(np.arange(4, dtype=np.float32))


def test_reads_long_lists_in_order(tmp_path: Path) -> None:
    """Ten comes after nine, whatever the names sort like."""
    path = _pytree()(tmp_path / "c", {"l": list(range(12))})
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
    path = _pytree(use_ocdbt=False)(tmp_path / "c", {"checkpoint": jnp.arange(5)})
    assert list(load(path)) == ["checkpoint"]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of arrays that were sharded over eight devices, by writer."""
    skip_without_typed_keys()
    folder = tmp_path_factory.mktemp("sharded")
    program = "import sys; from tests.orbax_backend import sharded_save; sharded_save.main(*sys.argv[1:])"
    run_python(program, folder, "ocdbt", "zarr3", "files", "ours", **devices(8))

    def write(writer: str) -> Path:
        if writer == "plain":
            pytree_handler(use_compression=False)  # skips where there is no such option
        if not (folder / writer).exists():
            run_python(program, folder, writer, **devices(8))
        return folder / writer

    return write


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["ocdbt", "zarr3", "files", pytest.param("plain", marks=pytest.mark.slow), "ours"])
def test_reads_shards_on_one_device(sharded: Callable[[str], Path], writer: str) -> None:
    """Many chunks and split replicas give whole arrays on a machine that lacks the saved devices; so do ours."""
    restored = load(sharded(writer))
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    for number, name in enumerate(["both", "rows", "columns", "merged", "replicated", "swapped"]):
        assert np.array_equal(restored[name], values + number), name
    assert np.array_equal(restored["large"], np.arange(80_000.0, dtype=np.float32).reshape(200, 400))
    assert restored["bf16"].dtype.name == "bfloat16"
    keys = restored["keys"]
    assert isinstance(keys, KeyData)
    assert np.array_equal(keys.data, jax.random.key_data(jax.random.split(jax.random.key(7), 8)))


@needs("orbax-checkpoint", 0, 12, why="writes other entries")
def test_saved_shardings_are_told(sharded: Callable[[str], Path]) -> None:
    """A handle has the sharding's text, ours the same as real Orbax's."""
    ours, theirs = handles(sharded("ours")), handles(sharded("ocdbt"))
    assert {name: h.sharding for name, h in ours.items()} == {name: h.sharding for name, h in theirs.items()}
    assert '"partition_spec": ["x", "y"]' in str(ours["both"].sharding)


@needs("orbax-checkpoint", 0, 12, why="writes other entries")
def test_shapes_of_shards_are_told(sharded: Callable[[str], Path]) -> None:
    """Those of arrays without replicas, which real Orbax cuts further, are its own."""
    ours, theirs = (
        json.loads((sharded(writer) / "_METADATA").read_text())["tree_metadata"] for writer in ("ours", "ocdbt")
    )
    for name, shape in (("both", [2, 4]), ("merged", [1, 8]), ("swapped", [1, 8]), ("bf16", [2, 2])):
        found = [one[f"('{name}',)"]["value_metadata"]["write_shape"] for one in (ours, theirs)]
        assert found == [shape, shape]


def test_a_deep_database_of_many_versions_is_read(tmp_path: Path) -> None:
    """B-trees of several levels with shared prefixes give the same keys as TensorStore itself lists."""
    tree = {f"layer{i:03d}": {"w": np.full(3, i), "b": np.full(400, float(i))} for i in range(25)}
    path = _pytree(use_compression=False)(tmp_path / "c", tree)
    shutil.rmtree(path / "d")
    (path / "manifest.ocdbt").unlink()
    spec = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{path}/"},
        "config": {"max_decoded_node_bytes": 700, "max_inline_value_bytes": 50, "version_tree_arity_log2": 1},
    }
    source = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/ocdbt.process_0/"}}
    old, new = ts.KvStore.open(source).result(), ts.KvStore.open(spec).result()
    for number, key in enumerate(old.list().result()):
        new[key] = old[key]
        if number % 10 == 0:
            new[key] = b"an older version"
            new[key] = old[key]
    root = ts.ocdbt.dump(ts.KvStore.open(spec["base"]).result()).result()["versions"][-1]
    assert root["root_height"] >= 2
    shutil.rmtree(path / "ocdbt.process_0")
    assert fingerprint(load(path)) == fingerprint(tree)


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
    found = handles(_v1(tmp_path / "c", common_tree))
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
    path = _pytree()(tmp_path / "c", {"a": {"b": np.ones(2)}, "a.b": np.ones(2)})
    with warnings_logged() as logged:
        reader = BACKEND.open(location_of(path))
    assert len(logged) == 1 and "a.b" in logged[0]
    assert isinstance(reader.tree.children["a.b"], LeafHandle)
