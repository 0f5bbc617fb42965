"""The JSON files, of which texts are put together: whatever the names are, they decode to what the plan says."""

from __future__ import annotations

import base64
import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax_ckpt_compat.orbax_backend import encode_metadata, shardings
from flax_ckpt_compat.orbax_backend.save_plan import make_plan
from hypothesis import given
from hypothesis import strategies as st

from flax_ckpt_compat._core import orbax_layout
from flax_ckpt_compat._core.tree import map_leaves
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
