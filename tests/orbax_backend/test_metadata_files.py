"""The JSON files, of which texts are put together: whatever the names are, they decode to what the plan says."""

from __future__ import annotations

import json
import types
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import writer, zarr
from flax_ckpt_compat.orbax_backend.leaf_handles import build_tree
from flax_ckpt_compat.orbax_backend.save_plan import make_plan
from flax_ckpt_compat.orbax_backend.type_annotations import ContainerType

from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.orbax_layout import DICT_KEY, SEQUENCE_KEY
from flax_ckpt_compat._core.tree import Branch, Container
from flax_ckpt_compat._trees import state_dict


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


def built(entries: list[tuple[str, str]], containers: Any = None) -> Any:
    """The tree of entries, paths with a letter for each kind of key: ``s`` of sequences, ``d`` of dicts."""
    structure: Any = types.SimpleNamespace(
        is_single_array=False,
        location=location_of("/p"),
        containers=containers or {},
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
