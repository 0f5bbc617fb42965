"""The array database's index: TensorStore and we read each other's, and hostile files are refused, without a leak."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import multiprocess, ocdbt, ocdbt_encode, open_index
from flax_ckpt_compat.orbax_backend.files import ByteRange
from flax_ckpt_compat.orbax_backend.ocdbt import read_entries
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat._core.errors import CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.location import location_of
from tests.support import ocdbt_files as made
from tests.support.ocdbt_files import values as values_of
from tests.support.orbax_trees import database
from tests.support.profiles import examples

VALUES = {b"a": b"1", b"b/.zarray": b"{}", b"b/0": bytes(300)}
ROOT = made.leaf(VALUES)


def _database(path: Path, values: dict[bytes, bytes], **config: Any) -> Any:
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}, "config": config}
    store = ts.KvStore.open(spec).result()
    transaction = ts.Transaction(atomic=True)
    for key, value in values.items():
        store.with_transaction(transaction)[key] = value
    transaction.commit_sync()
    return store


@pytest.mark.parametrize("compression", [None, {"id": "zstd"}, {"id": "zstd", "level": 1}, {"id": "zstd", "level": 9}])
@pytest.mark.parametrize("node_bytes", [700, 8 << 20], ids=["tall", "one node"])
def test_finds_what_tensorstore_finds(tmp_path: Path, compression: Any, node_bytes: int) -> None:
    """Keys and values of TensorStore's own databases: tall trees, several versions, values in nodes and in files."""
    rng = np.random.default_rng(0)
    values = {
        f"layer_{number // 7}.kernel é{number}/{'x' * (number % 5)}".encode(): rng.bytes(int(rng.integers(0, 400)))
        for number in range(200)
    }
    config = {"max_inline_value_bytes": 200, "max_decoded_node_bytes": node_bytes, "version_tree_arity_log2": 1}
    store = _database(tmp_path, values, compression=compression, **config)
    for number in range(5):
        store[f"late {number}".encode()] = b"x" * number
        del store[next(iter(values))]
        values.pop(next(iter(values)))
        values[f"late {number}".encode()] = b"x" * number
    assert made.values(tmp_path) == values
    found = read_entries(location_of(tmp_path))
    assert any(isinstance(value, ByteRange) for value in found.values())


@pytest.mark.parametrize("fill", [b"\0", None], ids=["zeros", "random"])
@pytest.mark.parametrize("level", [1, 3, 19])
def test_decodes_nodes_that_do_not_tell_their_length(tmp_path: Path, level: int, fill: bytes | None) -> None:
    """Nodes above 64 KiB are compressed as streams, whose headers lack the length."""
    rng = np.random.default_rng(0)
    values = {b"%05d" % number: fill * 900 if fill else rng.bytes(900) for number in range(600)}
    _database(tmp_path, values, compression={"id": "zstd", "level": level}, max_inline_value_bytes=1024)
    assert made.values(tmp_path) == values


def test_finds_nothing_in_an_empty_database(tmp_path: Path) -> None:
    """A version without a root has no keys."""
    store = _database(tmp_path, {b"a": b"1"})
    del store[b"a"]
    assert read_entries(location_of(tmp_path)) == {}


def test_what_the_test_writes_is_the_format(tmp_path: Path) -> None:
    """TensorStore reads the databases that the tests below damage, and so do we."""
    two = [made.envelope(made.NODE, made.leaf({b"a": b"1"})), made.envelope(made.NODE, made.leaf({b"b": b"22"}))]
    places = {b"a": (0, len(two[0])), b"b": (len(two[0]), len(two[1]))}
    tall = made.write(tmp_path / "tall", [*two, made.envelope(made.NODE, made.inner(places, 1))], height=1)
    flat = made.write(tmp_path / "flat", [made.envelope(made.NODE, ROOT)])
    for path, expected in ((tall, {b"a": b"1", b"b": b"22"}), (flat, VALUES)):
        store = database(path)
        assert {key: store[key] for key in store.list().result()} == expected
        assert made.values(path) == expected


BODIES = {
    "endless count": (made.leaf(VALUES, count=made.varint(2**62)), "expected"),
    "endless number": (made.leaf(VALUES, count=b"\xff" * 9 + b"\2"), "64 bits"),
    "cut off": (ROOT[:-1], "300 bytes|303 bytes|expected"),
    "more than all": (ROOT + b"x", "found 1 more"),
    "another height": (made.leaf(VALUES, height=b"\2"), "height 0 was expected, found one of height 2"),
    "shares too much": (made.leaf(VALUES, shared=made.column([9, 0])), "share"),
    "endless key": (made.leaf(VALUES, own=made.column([2**60, 1, 1])), "names of up to 65535"),
    "not ascending": (made.leaf({b"b": b"", b"a": b""}), "ascending"),
    "twice": (made.leaf(VALUES, keys=b"ab/0b/.zarray", own=made.column([1, 3, 9]), shared=made.column([0, 0])), "asc"),
    "endless value": (made.leaf(VALUES, lengths=made.column([2**63, 1, 1])), "expected"),
    "another kind": (made.leaf(VALUES, kinds=made.column([0, 7, 0])), "found 7"),
    "no such file": (made.leaf({b"a": b"1"}, kinds=b"\1", places=made.column([5, 0]), values=b""), "found number 5"),
    "the file behind the last": (
        made.leaf({b"a": b"1"}, kinds=b"\1", places=made.column([1, 0]), values=b""),
        "one of 1 files was expected, found number 1",
    ),
    "one key twice": (made.leaf({b"a": b"1", b"b": b"2"}, keys=b"aa"), "ascending"),
    "endless files": (made.leaf(VALUES, files=made.varint(2**40)), "expected"),
    "base too long": (made.leaf(VALUES, files=made.files([b"d/x"], [9])), "share no more bytes"),
}


@pytest.mark.parametrize("case", BODIES)
def test_nodes_that_lie_are_refused(tmp_path: Path, case: str) -> None:
    """The checksum is right and the content is not: file, expected and found are told."""
    body, told = BODIES[case]
    path = made.write(tmp_path, [made.envelope(made.NODE, body)])
    with pytest.raises(CorruptCheckpointError, match=told) as caught:
        read_entries(location_of(path))
    assert str(path / "d" / "x") in str(caught.value)
    assert caught.value.path == str(path / "d" / "x")


ENVELOPES = {
    "newer version": (made.envelope(made.NODE, ROOT, version=1), "version 0 was expected, found 1"),
    "another compression": (made.envelope(made.NODE, ROOT, compression=2), "found 0 with compression 2"),
    "no zstd": (made.envelope(made.NODE, ROOT, compression=1), "does not decompress"),
    "a manifest": (made.envelope(made.MANIFEST, ROOT), "0x0cdb20de and .* expected, found 0x0cdb3a2a"),
    "foreign": (b"<html>" * 9, "found 0x3c68746d"),
    "short": (b"\x0c\xdb\x20\xde", "18 bytes were expected, found 4"),
    "flipped": (made.envelope(made.NODE, ROOT)[:-20] + b"\xff" + made.envelope(made.NODE, ROOT)[-19:], "CRC-32C"),
}


@pytest.mark.parametrize("case", ENVELOPES)
@pytest.mark.parametrize("where", ["node", "manifest"])
def test_what_is_no_node_or_manifest_is_refused(tmp_path: Path, case: str, where: str) -> None:
    """Newer, foreign, cut off or flipped: file, expected and found are told."""
    data, told = ENVELOPES[case]
    if where == "node":
        path, file = made.write(tmp_path, [data]), "d/x"
    else:
        swapped = {made.NODE: made.MANIFEST, made.MANIFEST: made.NODE}.get(int.from_bytes(data[:4], "big"))
        if swapped is not None and len(data) > 4:
            data = swapped.to_bytes(4, "big") + data[4:-4]
            data += (made.crc32c(data) ^ (case == "flipped")).to_bytes(4, "little")
        told = "0x0cdb3a2a and .* expected, found 0x0cdb20de" if case == "a manifest" else told
        path, file = made.write(tmp_path, [made.envelope(made.NODE, ROOT)], first=data), "manifest.ocdbt"
    with pytest.raises(CorruptCheckpointError, match=told) as caught:
        read_entries(location_of(path))
    assert str(path / file) in str(caught.value)


RUN = ((128 << 10) << 3 | 2).to_bytes(3, "little") + b"\0"
BOMB = bytes.fromhex("28b52ffd0038") + RUN * 10_000 + b"\1\0\0"  # 40 KB of runs of zeros, which would be 1.3 GB
ONE = made.envelope(made.NODE, made.leaf({b"a": b"1"}))
TWO_PARENTS = made.envelope(made.NODE, made.inner({b"a": (0, len(ONE)), b"b": (0, len(ONE))}, 1))


@pytest.mark.parametrize(
    ("nodes", "height", "first", "told"),
    [
        ([made.envelope(made.NODE, BOMB, compression=1)], 0, None, r"a Zstandard frame|at most"),
        *(
            ([ONE], 0, made.manifest(*place), "expected, found")
            for place in ((0, 2**62), (2**62, 40), (0, len(ONE) + 1))
        ),
        ([ONE, TWO_PARENTS], 1, None, "two"),  # forty such levels would have 2**40 keys
    ],
)
def test_indexes_that_ask_for_memory_are_refused(
    tmp_path: Path, nodes: Any, height: int, first: Any, told: str
) -> None:
    """They are refused before: bombs, places beyond the end of the file, and nodes with two parents."""
    path = made.write(tmp_path, nodes, height=height, first=first)
    with pytest.raises(CorruptCheckpointError, match=told):
        read_entries(location_of(path))


def test_many_small_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a few KB, each within its limit, have one for all of them (lowered here)."""
    nodes, manifest = ocdbt_encode.encode_index([(b"x" * 60_000 + b"%d" % n, b"") for n in range(400)], "d/nodes")
    assert len(nodes) < 20_000
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "nodes").write_bytes(nodes)
    (tmp_path / "manifest.ocdbt").write_bytes(manifest)
    assert len(read_entries(location_of(tmp_path))) == 400
    monkeypatch.setattr(ocdbt, "_MAX_INDEX_BYTES", 9 << 20)
    with pytest.raises(CorruptCheckpointError, match="names and values"):
        read_entries(location_of(tmp_path))


@pytest.mark.parametrize("name", [b"../secret", b"d/../../secret", b"/etc/passwd", b"d/\0x"])
@pytest.mark.parametrize("where", ["value", "node", "base"])
def test_nothing_outside_the_directory_is_read(tmp_path: Path, name: bytes, where: str) -> None:
    """Neither a value, nor a node, nor a node through its parent's path."""
    if where == "value":
        body = made.leaf({b"a": b"1"}, [name], kinds=b"\1", places=made.column([0, 0]), values=b"")
        path = made.write(tmp_path, [made.envelope(made.NODE, body)])
    elif where == "node":
        path = made.write(tmp_path, [made.envelope(made.NODE, ROOT)], first=made.manifest(0, 40, file=name))
    else:
        body = made.inner({b"a": (0, 40)}, 1, [name])
        path = made.write(tmp_path, [made.envelope(made.NODE, body)], height=1)
    with pytest.raises(CorruptCheckpointError, match="outside"):
        read_entries(location_of(path))


def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    """The files of a database are its own."""
    path = tmp_path / "c"
    _database(path, VALUES)
    for file in (path / "manifest.ocdbt", *(path / "d").iterdir()):
        file.rename(tmp_path / "outside")
        file.symlink_to(tmp_path / "outside")
        with pytest.raises(StorageError, match="is a link"):
            open_index.open_database(location_of(path))
        (tmp_path / "outside").replace(file)
    assert open_index.open_database(location_of(path)).get("absent") is None


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
