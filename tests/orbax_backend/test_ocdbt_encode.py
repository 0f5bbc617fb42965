"""The indexes that we write: TensorStore's own driver finds in them what was put there, and so does our decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import multiprocess, ocdbt_encode
from flax_ckpt_compat.orbax_backend.files import ByteRange
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat._core.location import location_of
from tests.support.ocdbt_files import values as values_of
from tests.support.orbax_trees import database
from tests.support.profiles import examples

# Of up to 1,024 bytes inline, of more in a file.
_values = st.one_of(st.binary(max_size=40), st.sampled_from([bytes(1024), bytes(1025), b"x" * 3000]))
# Zeros within names, and beginnings that are shared; none ends in a zero, as no key of zarr does.
_names = st.text(st.sampled_from("ab/\0é"), max_size=12).map(lambda name: f"{name}/0".encode())
_contents = st.dictionaries(_names, _values, min_size=1, max_size=30)


def write(path: Path, values: dict[bytes, bytes]) -> None:
    """Write a database with these values, those of more than 1,024 bytes in a data file."""
    path.mkdir()
    (path / "d").mkdir()
    outside = [value for value in values.values() if len(value) > 1024]
    (path / "d" / "values").write_bytes(b"".join(outside))
    ends = iter(np.cumsum([0, *map(len, outside)]).tolist())
    entries: list[tuple[bytes, bytes | ByteRange]] = [
        (key, ByteRange("d/values", next(ends), len(value)) if len(value) > 1024 else value)
        for key, value in values.items()
    ]
    nodes, manifest = ocdbt_encode.encode_index(entries, "d/nodes")
    (path / "d" / "nodes").write_bytes(nodes)
    (path / "manifest.ocdbt").write_bytes(manifest)


def dumped(path: Path) -> Any:
    """The newest version in the manifest, as TensorStore shows it."""
    return ts.ocdbt.dump(ts.KvStore.open(f"file://{path}/").result()).result()["versions"][-1]


def by_tensorstore(path: Path) -> dict[bytes, bytes]:
    """All values that TensorStore finds, by listing and by looking up."""
    store = database(path)
    return {bytes(key): bytes(store.read(key).result().value) for key in store.list().result()}


@settings(max_examples=examples(60, 40), deadline=None)
@given(
    contents=_contents,
    count=st.integers(1, 4),
    node_bytes=st.sampled_from([1, 60, 300, 8 << 20]),
    compress=st.booleans(),
)
def test_tensorstore_finds_what_was_put(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[bytes, bytes], count: int, node_bytes: int, compress: bool
) -> None:
    """In trees of any height, and in any order, also what several processes put, each into files of its own.

    The statistics are those of the format."""
    path = tmp_path_factory.mktemp("index") / "c"
    parts = [dict(list(contents.items())[number::count]) for number in range(min(count, len(contents)))]
    names = [f"ocdbt.process_{number}" for number in range(len(parts))]
    with (
        mock.patch.object(ocdbt_encode, "_NODE_BYTES", node_bytes),
        mock.patch.object(ocdbt_encode, "_COMPRESS_FROM_BYTES", 0 if compress else 1 << 30),
    ):
        if count == 1:
            write(path, contents)
        else:
            path.mkdir()
            for name, part in zip(names, parts, strict=True):
                write(path / name, part)
            multiprocess.merge(str(path), names, location_of(path))
    assert by_tensorstore(path) == contents == values_of(path)
    statistics = dumped(path)["root"]["statistics"]
    assert statistics["num_keys"] == len(contents)
    assert statistics["num_indirect_value_bytes"] == sum(len(one) for one in contents.values() if len(one) > 1024)
    if count == 1:
        assert statistics["num_tree_bytes"] == (path / "d" / "nodes").stat().st_size


def test_names_of_very_different_lengths(tmp_path: Path) -> None:
    """Up to the longest that the format has."""
    contents = {b"%05d" % number + b"n" * 10 ** (number % 5) + b"/0": b"%d" % number for number in range(400)}
    contents[b"z" * 65_533 + b"/0"] = b"last"
    write(tmp_path / "c", contents)
    assert by_tensorstore(tmp_path / "c") == contents == values_of(tmp_path / "c")


@pytest.mark.parametrize("node_bytes", [1, 8 << 20])
def test_a_key_twice_is_refused(node_bytes: int) -> None:
    """Two processes that wrote one chunk would lose one of them."""
    with (
        mock.patch.object(ocdbt_encode, "_NODE_BYTES", node_bytes),
        pytest.raises(ValueError, match="'b/0' would be in the index twice"),
    ):
        entries = [(key, b"1") for key in (b"b/0", b"a/0", b"b/0")]
        ocdbt_encode.encode_index(entries, "d/x")


def test_the_index_of_tensorstore_is_merged(tmp_path: Path) -> None:
    """Of a process that TensorStore wrote for, in nodes with and without a common beginning of their keys."""
    expected = {}
    for number, node_bytes in enumerate((300, 8 << 20)):
        spec = {
            "driver": "ocdbt",
            "base": f"file://{tmp_path}/c/ocdbt.process_{number}/",
            "config": {"max_decoded_node_bytes": node_bytes, "max_inline_value_bytes": 100},
        }
        store, transaction = ts.KvStore.open(spec).result(), ts.Transaction(atomic=True)
        for item in range(50):
            expected[key := b"params/dense_%d/%d/0" % (item, number)] = bytes([item]) * (item * 4)
            store.with_transaction(transaction)[key] = expected[key]
        transaction.commit_sync()
    names = ["ocdbt.process_0", "ocdbt.process_1"]
    multiprocess.merge(str(tmp_path / "c"), names, location_of(tmp_path / "c"))
    assert by_tensorstore(tmp_path / "c") == expected == values_of(tmp_path / "c")
