"""The JSON files, of which texts are put together: whatever the names are, they decode to what the plan says."""

from __future__ import annotations

import base64
import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import encode_metadata, shardings, writer, zarr
from flax_ckpt_compat.orbax_backend.build_tree import build_tree
from flax_ckpt_compat.orbax_backend.save_plan import make_plan
from flax_ckpt_compat.orbax_backend.type_annotations import ContainerType
from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat._core import orbax_layout
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.orbax_layout import DICT_KEY, SEQUENCE_KEY
from flax_ckpt_compat._core.tree import Branch, Container, map_leaves
from flax_ckpt_compat._trees import prng_keys, state_dict

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4).filter(lambda name: "." not in name)
LEAVES = st.sampled_from(
    [np.zeros(3, np.float32), np.int16(4), 2.5, True, None, {}, [], (), jnp.ones((2, 3)), jax.random.key(0), b"x", 1j]
)
TREES = st.dictionaries(
    NAMES.map(lambda name: name.replace("/", "-")),
    st.recursive(LEAVES, lambda inner: st.lists(inner, min_size=1, max_size=3) | st.tuples(inner, inner), max_leaves=6),
    min_size=1,
    max_size=4,
)


def test_leaves_are_in_the_order_of_jax() -> None:
    """Which sorts keys that are ints as numbers."""
    tree = {"d": {number: number for number in range(12)}, "a": {str(number): number for number in range(12)}}
    plan = make_plan(state_dict.describe(tree))
    expected = [[str(key.key) for key in path] for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert [[name for name, _ in entry.keys] for entry in plan.entries] == expected


def test_shards_that_are_no_grid_are_one() -> None:
    """Jax cannot tell their shape; the array is written whole."""

    def refuse(_: tuple[int, ...]) -> tuple[int, ...]:
        raise ValueError("5 is not divisible by 2")

    sharding = types.SimpleNamespace(is_fully_replicated=False, shard_shape=refuse)
    assert shardings.shard_shape((5, 3), sharding) == (5, 3)


def test_only_tuples_need_a_note_of_their_own() -> None:
    """Orbax's own files tell dicts from lists, so the note beside them is of what they cannot tell."""
    plan = make_plan(state_dict.describe({"d": {"x": 1}, "l": [1, {"y": 2}], "t": (1, 2), "empty": (), "none": {}}))
    note = json.loads(encode_metadata.tree_metadata(plan, zarr3=False))["custom_metadata"]
    assert note == {"flax_ckpt_compat": {"format": 1, "leaves": {}, "containers": [[["t"], "tuple", []]]}}


@given(TREES)
def test_texts_decode_to_the_plan(tree: dict[str, Any]) -> None:
    """Every leaf is listed once, with its key path, type, part and sharding, in each file that lists it."""
    plan = make_plan(map_leaves(lambda _, leaf: prng_keys.split_key(leaf), state_dict.describe(tree)))
    entries = json.loads(encode_metadata.tree_metadata(plan, zarr3=False))["tree_metadata"]
    assert list(entries) == [str(tuple(name for name, _ in entry.keys)) for entry in plan.entries]
    arrays = {}
    for entry, found in zip(plan.entries, entries.values(), strict=True):
        kinds = [(part["key"], part["key_type"] == orbax_layout.SEQUENCE_KEY) for part in found["key_metadata"]]
        assert kinds == list(entry.keys)
        value = found["value_metadata"]
        assert value["value_type"] == (entry.marker if entry.stored is None else entry.stored.value_type)
        assert value["skip_deserialize"] is (entry.stored is None)
        if value["value_type"] == "jax.Array":
            arrays[entry.name] = entry.stored
            assert value["write_shape"] == list(entry.stored.shape)
    listed = [
        one["array_metadata"] for one in json.loads(encode_metadata.array_metadatas(plan, 2**31))["array_metadatas"]
    ]
    assert [one["param_name"] for one in listed] == list(arrays)
    for one, stored in zip(listed, arrays.values(), strict=True):
        assert one["write_shape"] == one["chunk_shape"] == list(stored.shape)
        impl = stored.annotation.impl if stored.annotation else None
        assert one["ext_metadata"] == ({"random_key_impl": impl} if impl else None)
    shardings = json.loads(encode_metadata.shardings(plan))
    assert [base64.urlsafe_b64decode(key).decode() for key in shardings] == list(arrays)
    device = str(jax.local_devices()[0])
    for text in shardings.values():
        assert json.loads(text) == {"sharding_type": "SingleDeviceSharding", "device_str": device}


def metadata(shape: list[int], chunks: list[int], dtype: str = "<f8") -> bytes:
    """A ``.zarray``."""
    return json.dumps({"dtype": dtype, "shape": shape, "chunks": chunks, "zarr_format": 2}).encode()


@pytest.mark.parametrize(
    ("shape", "chunks", "why"),
    [
        ([2**59], [1], "fits no memory"),
        ([0, 2**59], [1, 1], "fits no memory"),
        ([2**62], [1], "is not a shape"),
        ([-1], [1], "is not a shape"),
        ([True], [1], "is not a shape"),
        ([1] * 33, [1] * 33, "is not a shape"),
        ([4], [0], "is not a grid"),
        ([4], [2, 2], "is not a grid"),
    ],
)
def test_impossible_arrays(shape: list[int], chunks: list[int], why: str) -> None:
    """From 2**62 bytes on, where sizes and offsets no longer fit 64 bits, also of arrays without elements."""
    with pytest.raises(ValueError, match=why):
        zarr.parse_array_metadata(metadata(shape, chunks), zarr3=False)


def test_the_largest_arrays() -> None:
    """One byte less is possible, and 32 axes."""
    assert zarr.parse_array_metadata(metadata([2**59 - 1], [1]), zarr3=False).shape == (2**59 - 1,)
    assert zarr.parse_array_metadata(metadata([1] * 32, [1] * 32), zarr3=False).shape == (1,) * 32


def test_how_large_arrays_are_split() -> None:
    """Plain ones from 2 GiB on; chunks of a shard divide it evenly, unless only far smaller ones would."""
    gib = 2**30
    assert zarr.chunk_shape((2 * gib,), (2 * gib,), 1, zarr.Encoding().chunk_bytes) == [2 * gib]
    assert zarr.chunk_shape((4 * gib,), (4 * gib,), 1, zarr.Encoding().chunk_bytes) == [2 * gib]
    assert zarr.chunk_shape((6, gib), (6, gib), 1, zarr.Encoding().chunk_bytes) == [2, gib]
    assert zarr.chunk_shape((18, gib), (9, gib), 1, zarr.Encoding().chunk_bytes) == [1, gib]
    assert zarr.chunk_shape((202, 3 * gib // 101), (101, 3 * gib // 101), 1, zarr.Encoding().chunk_bytes)[0] == 101


@pytest.mark.parametrize("compression", [None, "crc32c", "zstd"])
@pytest.mark.parametrize("dtype", sorted(name for name in zarr._V3_NAMES if hasattr(ts, name)))  # old ones lack some
def test_it_is_what_tensorstore_writes(dtype: str, compression: str | None) -> None:
    """Members and values are those of the file that TensorStore makes of them; any release of it reads that."""
    encoding, metadata = writer._ENCODINGS[compression], {"shape": [6, 8], "dtype": zarr.dtype_from_name(dtype)}
    ours = zarr.dump_metadata((6, 8), (3, 8), np.dtype(metadata["dtype"]), encoding)
    context = ts.Context()
    spec = {"driver": "zarr3" if encoding.checksums else "zarr", "kvstore": "memory://", "metadata": ours}
    ts.open(spec, create=True, context=context).result()
    theirs = json.loads(ts.KvStore.open("memory://", context=context).result()[encoding.metadata_file])
    assert theirs == ours


def built(entries: list[tuple[str, str]], containers: Any = None) -> Any:
    """The tree of entries, paths with a letter for each kind of key: ``s`` of sequences, ``d`` of dicts."""
    structure: Any = types.SimpleNamespace(
        is_single_array=False,
        location=location_of("/p"),
        annotations=None if containers is None else types.SimpleNamespace(containers=containers),
        rich_types={},
        entries=[
            types.SimpleNamespace(
                path=tuple(path.split("/")), kinds=tuple({"s": SEQUENCE_KEY, "d": DICT_KEY}[one] for one in kinds)
            )
            for path, kinds in entries
        ],
    )
    return build_tree(structure, [path for path, _ in entries])


@pytest.mark.parametrize("entries", [[("a/0", "ds"), ("a/b", "dd")], [("a/b", "dd"), ("a/0", "ds")]])
def test_children_by_index_and_by_name_are_a_dict(entries: list[tuple[str, str]]) -> None:
    """As Orbax saves a `flax.nnx.List`, which it cannot restore."""
    assert built(entries).children["a"] == Branch({name[2:]: name for name, _ in entries})


def test_annotations() -> None:
    """They say what a sequence or a dict is, make no sequence of a dict, and name no keys that are not there."""
    named = {("a",): ContainerType(Container.NAMEDTUPLE, frozenset({"x", "gone"}))}
    assert built([("a/x", "dd")], named).children["a"].int_keys == {"x"}
    assert built([("a/x", "dd")], {("a",): ContainerType(Container.LIST)}).children["a"] == Branch({"x": "a/x"})
    assert built([("a/0", "ds")], {("a",): ContainerType(Container.TUPLE)}).children["a"] == Branch(
        {"0": "a/0"}, Container.TUPLE
    )
    assert built([], {(): ContainerType(Container.NAMEDTUPLE)}) == Branch({}, Container.NAMEDTUPLE)
