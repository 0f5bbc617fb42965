"""What real Orbax writes, read by us, and what we write, read by PyTreeCheckpointer, StandardCheckpointer and v1."""

import collections
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import open_index, zarr
from flax_ckpt_compat.orbax_backend.save_plan import make_plan
from flax_ckpt_compat.orbax_backend.stored_names import DICT_KEY, SEQUENCE_KEY

from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import Branch, Container, KeyData
from flax_ckpt_compat._trees import state_dict
from tests.orbax_backend.conftest import WRITERS
from tests.support.orbax_trees import BACKEND, change_metadata, load, on_host, save
from tests.support.peers import needs, ocp_v1, skip_without_typed_keys, version
from tests.support.spread import whole
from tests.support.trees import ML_DTYPES, NUMPY_DTYPES, fill, fingerprint


@pytest.mark.parametrize("writer", WRITERS)
def test_reads_what_real_orbax_writes(tmp_path: Path, common_tree: dict[str, Any], writer: str) -> None:
    """Every layout that the current release writes gives the saved values, dtypes, shapes and types."""
    path = WRITERS[writer](tmp_path / "c", common_tree)
    assert fingerprint(load(path)) == fingerprint(on_host(common_tree))


NARROW = {"i": np.int16(3), "f": np.float32(1.5), "c": np.complex64(1j)}


@pytest.mark.parametrize(
    ("write", "tree", "expected"),
    [
        # As saved, but for scalars of 64 bits, which are stored just as Python numbers are.
        (WRITERS["v0"], {**NARROW, "w": np.int64(3), "d": np.float64(2.5)}, {**NARROW, "w": 3, "d": 2.5}),
        pytest.param(
            WRITERS["v0"],
            jnp.arange(4.0),
            np.arange(4, dtype=np.float32),
            marks=needs("orbax-checkpoint", 0, 12, why="cannot save a bare jax array"),
        ),
        (WRITERS["v0"], {"l": list(range(12))}, {"l": list(range(12))}),  # ten after nine
        # Only a declared single array loses its key.
        (WRITERS["files"], {"checkpoint": np.arange(5)}, {"checkpoint": np.arange(5)}),
    ],
)
def test_reads_what_else_real_orbax_writes(tmp_path: Path, write: Any, tree: Any, expected: Any) -> None:
    """Scalars of numpy, long lists, and trees of one leaf."""
    assert fingerprint(load(write(tmp_path / "c", tree))) == fingerprint(expected)


@pytest.mark.parametrize("writer", ["v0", "zarr3"])
def test_compressed_chunks_as_long_as_their_arrays(tmp_path: Path, writer: str) -> None:
    """Their bytes lie in the database like those of small arrays, and are not the arrays' own: Orbax compresses."""
    tree = {f"a{length}": np.ones(length, np.uint8) for length in range(10, 40)}
    path = WRITERS[writer](tmp_path / "c", tree)
    index = open_index.open_database(location_of(path))
    chunks = {name: index.get(f"{name}/c/0" if writer == "zarr3" else f"{name}/0") for name in tree}
    assert any(len(chunk or b"") == tree[name].nbytes for name, chunk in chunks.items())
    assert fingerprint(load(path)) == fingerprint(tree)


READERS = {
    "pytree": lambda path: ocp.PyTreeCheckpointer().restore(path),
    "standard": lambda path: ocp.StandardCheckpointer().restore(path),
    "v1": lambda path: ocp_v1.load(path),
}
SMALL_INTS = ("int1", "uint1", "int2", "uint2")  # not every byte is one
EVERY_ML_DTYPE = [
    np.dtype(getattr(ml_dtypes, name))
    for name in dir(ml_dtypes)
    if isinstance(getattr(ml_dtypes, name), type) and issubclass(getattr(ml_dtypes, name), np.generic)
]
# Orbax names these and stores them; the rest is stored as what it can name (see the next test).
KNOWN = [d for d in NUMPY_DTYPES + ML_DTYPES if d.kind not in "mMUSO" and d.name not in ("uint4", "float128")]


@pytest.mark.parametrize("reader", ["ours", *READERS])
@pytest.mark.parametrize("compression", [None, "crc32c", "zstd"])
def test_all_restore_every_common_leaf(
    tmp_path: Path, common_tree: dict[str, Any], reader: str, compression: str | None
) -> None:
    """Values, dtypes, shapes, Python types and structure come back as they were saved."""
    path = save(tmp_path / "c", common_tree, compression)
    restored = load(path) if reader == "ours" else on_host(READERS[reader](path))
    assert fingerprint(restored) == fingerprint(on_host(common_tree))


def test_v1_restores_into_an_abstract_tree(tmp_path: Path, common_tree: dict[str, Any]) -> None:
    """The structure in our metadata is the one that v1 compares an abstract tree with; shapes and dtypes are known."""
    path = save(tmp_path / "c", common_tree)
    assert fingerprint(on_host(ocp_v1.load(path, common_tree))) == fingerprint(on_host(common_tree))
    bias = ocp_v1.metadata(save(tmp_path / "d", {"bias": jnp.ones(4, jnp.bfloat16)})).metadata["bias"]
    assert (bias.shape, bias.dtype) == ((4,), jnp.bfloat16)


@pytest.mark.parametrize("compression", [None, "crc32c", "zstd"])
def test_every_dtype(tmp_path: Path, compression: str | None) -> None:
    """All of numpy's and ml_dtypes' dtypes in both byte orders, 0-d, empty, small and large.

    Real Orbax reads those that it can name, in native byte order."""
    # Compressed arrays are written by TensorStore, and an older one does not know these.
    unknown = (
        {"float4_e2m1fn", "float8_e8m0fnu", "int2", "uint2", "float8_e3m4", "float8_e4m3"}
        if compression and version("tensorstore") < (0, 1, 86)
        else ()
    )
    foreign = [d.newbyteorder(">") for d in NUMPY_DTYPES if d.itemsize > 1 and d.kind != "S" and d.name != "float128"]
    tree = {
        f"{number}_{d}_{i}": np.ones(shape, d) if d.name in SMALL_INTS else fill(shape, d, i)
        for number, d in enumerate([*NUMPY_DTYPES, *EVERY_ML_DTYPE, *foreign])
        for i, shape in enumerate([(), (3,), (0, 4), (7, 11), (200, 300)])
        if d.name not in unknown
    }
    assert fingerprint(load(save(tmp_path / "c", tree, compression))) == fingerprint(tree)
    native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in tree.items()}
    known = {name: array for name, array in native.items() if array.dtype in KNOWN}
    assert len(known) > 5 * len(KNOWN)
    path = save(tmp_path / "known", {name: tree[name] for name in known}, compression)  # an older one reads no others
    for read in READERS.values() if compression is None else [READERS["pytree"]]:
        found = read(path)
        assert fingerprint({name: found[name] for name in known}) == fingerprint(known)


@pytest.mark.parametrize(
    "tree",
    [np.arange(3), jnp.float32(3), 7, "hello", {}, [], (), None],
    ids=["numpy", "jax", "int", "str", "dict", "list", "tuple", "none"],
)
@pytest.mark.parametrize("reader", ["pytree", "v1"])
def test_real_orbax_reads_a_bare_leaf_and_an_empty_tree(tmp_path: Path, tree: Any, reader: str) -> None:
    """Whole trees that real Orbax partly refuses to write; it reads them all."""
    if isinstance(tree, jax.Array) and reader == "pytree" and version("orbax-checkpoint") < (0, 12):
        pytest.skip("this orbax-checkpoint cannot restore a bare jax array")
    restored = READERS[reader](save(tmp_path / "c", tree))
    assert fingerprint(on_host(restored)) == fingerprint(on_host(tree))


def test_real_orbax_restores_a_key_on_the_host(tmp_path: Path) -> None:
    """Key data that is numpy already is still a typed key for real Orbax."""
    skip_without_typed_keys()
    data = np.array([1, 2], np.uint32)
    path = save(tmp_path / "c", {"k": KeyData("threefry2x32", data)})
    restored = ocp.PyTreeCheckpointer().restore(path)["k"]
    assert np.array_equal(jax.random.key_data(restored), data)


def test_host_copies_are_stored_as_the_arrays_that_they_were(tmp_path: Path) -> None:
    """A copy made for a background save comes back from real Orbax as a jax.Array with its sharding."""
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:1], ("x",)), jax.sharding.PartitionSpec("x"))
    path = save(tmp_path / "c", {"a": whole(np.arange(4, dtype=np.float32), sharding)})
    restored = ocp.PyTreeCheckpointer().restore(path)["a"]
    assert restored.sharding == sharding
    assert np.array_equal(restored, np.arange(4))


@pytest.mark.parametrize(
    "name",
    ["..", "../x", "a/../b", "/", "//", "/abs", "a\0b", "\0", "%41", "?", "#f", '"q', "\n", "zz/", "x" * 300, ""],
)
def test_real_orbax_finds_odd_names(tmp_path: Path, name: str) -> None:
    """Names that look like paths or escapes lie at the keys where real Orbax looks, for small and large arrays."""
    tree = {name: np.arange(3), "d": {name: np.full(20_000, 2.0)}}
    assert fingerprint(ocp.PyTreeCheckpointer().restore(save(tmp_path / "c", tree))) == fingerprint(tree)


@needs("orbax-checkpoint", 0, 12, 8, why="writes other entries")
def test_metadata_files_are_those_of_real_orbax(tmp_path: Path) -> None:
    """Real Orbax's own files of the same tree hold the same JSON, apart from times and our annotations."""
    tree = {"a": jnp.arange(3.0), "l": [1, "x", None], "n": {"b": np.arange(2), "e": {}}, "key": jax.random.key(0)}
    ours = Path(save(tmp_path / "ours", tree))
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", tree)
    for name in ("_METADATA", "_sharding", "_strings.json", "array_metadatas/process_0", "_CHECKPOINT_METADATA"):
        mine, their = (json.loads((tmp_path / at / name).read_text()) for at in ("ours", "theirs"))
        for volatile in ("init_timestamp_nsecs", "commit_timestamp_nsecs", "custom_metadata"):
            mine.pop(volatile, None), their.pop(volatile, None)
        assert mine == their, name
    names = {str(file.relative_to(ours)) for file in ours.rglob("*") if file.is_file() and file.parent.name != "d"}
    assert "commit_success.txt" in names
    assert not any(name.startswith("ocdbt.process") for name in names)


def test_leaves_are_in_the_order_of_jax() -> None:
    """Which sorts keys that are ints as numbers, and keeps fields as they are declared."""
    fields = collections.namedtuple("fields", "z a")(1, 2)
    tree = {"d": {n: n for n in range(12)}, "a": {str(n): n for n in range(12)}, "b": fields}
    plan = make_plan(state_dict.describe(tree))
    expected = [
        [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    assert [list(entry.path) for entry in plan.entries] == expected


@pytest.mark.parametrize("encoding", [zarr.Encoding(), zarr.Encoding(True), zarr.Encoding(True, True)])
@pytest.mark.parametrize("dtype", sorted(name for name in zarr._V3_NAMES if hasattr(ts, name)))  # old ones lack some
def test_it_is_what_tensorstore_writes(dtype: str, encoding: zarr.Encoding) -> None:
    """Members and values are those of the file that TensorStore makes of them; any release of it reads that."""
    metadata = {"shape": [6, 8], "dtype": zarr.dtype_from_name(dtype)}
    ours = zarr.dump_metadata((6, 8), (3, 8), np.dtype(metadata["dtype"]), encoding)
    context = ts.Context()
    spec = {"driver": "zarr3" if encoding.checksums else "zarr", "kvstore": "memory://", "metadata": ours}
    ts.open(spec, create=True, context=context).result()
    theirs = json.loads(ts.KvStore.open("memory://", context=context).result()[encoding.metadata_file])
    assert theirs == ours


@pytest.mark.parametrize(
    ("keys", "container", "expected"),
    [
        # As Orbax saves a `flax.nnx.List`, which it cannot restore.
        ({"0": SEQUENCE_KEY, "b": DICT_KEY}, None, Branch({"0": None, "b": None})),
        ({"b": DICT_KEY, "0": SEQUENCE_KEY}, None, Branch({"b": None, "0": None})),
        ({"0": SEQUENCE_KEY}, None, Branch({"0": None}, Container.LIST)),
        # Annotations say which sequence or dict it is, make no sequence of a dict, and name no keys that are not there.
        ({"0": SEQUENCE_KEY}, ["tuple", []], Branch({"0": None}, Container.TUPLE)),
        ({"0": DICT_KEY}, ["list", []], Branch({"0": None})),
        ({"3": DICT_KEY}, ["dict", ["3", "7"]], Branch({"3": None}, int_keys=frozenset({"3"}))),
    ],
)
def test_containers(keys: dict[str, int], container: Any, expected: Branch, tmp_path: Path) -> None:
    """They are told by the keys of their entries, and by annotations."""
    entries = {
        name: {
            "key_metadata": [{"key": "a", "key_type": DICT_KEY}, {"key": name, "key_type": kind}],
            "value_metadata": {"value_type": "None", "skip_deserialize": True},
        }
        for name, kind in keys.items()
    }
    path = Path(save(tmp_path / "c", {}))
    marks = {"format": 1, "leaves": {}, "containers": [[["a"], *container]] if container else []}
    change_metadata(path, tree_metadata=entries, custom_metadata={"flax_ckpt_compat": marks})
    found: Any = BACKEND.open(location_of(path)).tree
    assert found.children["a"] == expected
