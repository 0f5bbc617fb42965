"""The JSON files, of which texts are put together: whatever the names are, they decode to what the plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import writer, zarr
from flax_ckpt_compat.orbax_backend.save_plan import make_plan

from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.orbax_layout import DICT_KEY, SEQUENCE_KEY
from flax_ckpt_compat._core.tree import Branch, Container
from flax_ckpt_compat._trees import state_dict
from tests.support.orbax_trees import BACKEND, change_metadata, save


def test_leaves_are_in_the_order_of_jax() -> None:
    """Which sorts keys that are ints as numbers."""
    tree = {"d": {number: number for number in range(12)}, "a": {str(number): number for number in range(12)}}
    plan = make_plan(state_dict.describe(tree))
    expected = [[str(key.key) for key in path] for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert [[name for name, _ in entry.keys] for entry in plan.entries] == expected


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
