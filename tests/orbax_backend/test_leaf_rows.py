"""The keys of large databases in arrays: whether some of them are there, and how far values reach into files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import ocdbt
from flax_ckpt_compat.orbax_backend.ocdbt_encoding import Columns
from flax_ckpt_compat.orbax_backend.ocdbt_nodes import ends_of

from flax_ckpt_compat._core.location import location_of
from tests.support import ocdbt_files as made


def tall(path: Path, leaves: dict[bytes, bytes]) -> str:
    """A database of several leaf nodes, given by the first key of each."""
    nodes = [made.envelope(made.NODE, body) for body in leaves.values()]
    starts = np.cumsum([0, *map(len, nodes)]).tolist()
    places = {key: (start, len(node)) for key, start, node in zip(leaves, starts, nodes, strict=False)}
    return str(made.write(path, [*nodes, made.envelope(made.NODE, made.inner(places, 1))], height=1))


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        (b"w/", [b"0", b"1", b"2"]),
        (b"w/", [b"0", b"1", b"2", b"33"]),
        (b"w/", [b"0", b"1", b"22"]),
        (b"w/", [b"0", b"1", b"2", b"3"]),
        (b"x/", [b"0"]),
        (b"x/", [b"0", b"1"]),
        (b"y/", [b"0"]),
        (b"a/", [b"0"]),
    ],
)
def test_all_of_some_keys(prefix: bytes, names: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there if each of them is: none behind the last key, none longer or shorter than the stored one."""
    first, second = {b"w/0": b"", b"w/1": b"", b"w/2": b""}, {b"w/33": b"", b"x/0": b""}
    monkeypatch.setattr(ocdbt, "_ROWS_FROM", 1)
    rows: Any = ocdbt.read_entries(location_of(tall(tmp_path, {b"w/0": made.leaf(first), b"w/33": made.leaf(second)})))
    expected = all(prefix + name in {**first, **second} for name in names)
    assert rows.holds(prefix, np.array(names)) == expected


@pytest.mark.parametrize("rows_from", [1, 100], ids=["rows", "dict"])
def test_ends_of_files(rows_from: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The furthest byte of any value, in whatever order they lie."""

    def leaf(*extents: tuple[int, int]) -> bytes:
        offsets, lengths = zip(*extents, strict=True)
        keys = dict.fromkeys((b"%d" % offset for offset in offsets), b"")
        kinds = b"\1" * len(extents)
        places = made.column([0] * len(extents)) + made.column(offsets)
        return made.leaf(keys, lengths=made.column(lengths), kinds=kinds, places=places)

    path = tall(tmp_path, {b"1": leaf((100, 5), (20, 7)), b"3": leaf((3, 3))})
    monkeypatch.setattr(ocdbt, "_ROWS_FROM", rows_from)
    assert ends_of(ocdbt.read_entries(location_of(path))) == {"d/x": 105}


def test_numbers_of_more_bytes_than_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format allows zeros at the end of a number."""
    places = b"\x80\x80\x80\x80\0\0" + made.column([3, 700])
    leaf = made.leaf({b"a": b"", b"b": b""}, lengths=made.column([9, 8]), kinds=b"\1\1", places=places)
    monkeypatch.setattr(ocdbt, "_ROWS_FROM", 1)
    rows: Any = ocdbt.read_entries(location_of(tall(tmp_path, {b"a": leaf})))
    assert rows.get(b"b") == ("d/x", 700, 8)
    assert ends_of(rows) == {"d/x": 708}


def test_where_values_lie_is_decoded_anew_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C within the first look-up, or another thread's look-up at the same time, spoils no other."""
    places = made.column([0, 0]) + made.column([3, 700])
    leaf = made.leaf({b"a": b"", b"b": b""}, lengths=made.column([9, 8]), kinds=b"\1\1", places=places)
    monkeypatch.setattr(ocdbt, "_ROWS_FROM", 1)
    rows: Any = ocdbt.read_entries(location_of(tall(tmp_path, {b"a": leaf})))
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    with mock.patch.object(Columns, "finish", interrupt), pytest.raises(KeyboardInterrupt):
        rows.get(b"a")
    assert [rows.get(b"a"), rows.get(b"b")] == [("d/x", 3, 9), ("d/x", 700, 8)]


def test_keys_with_another_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node leaves out what its keys have in common; others that end alike are not there."""
    config = {"max_decoded_node_bytes": 700}
    store: Any = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}).result()
    transaction = ts.Transaction(atomic=True)
    for number in range(100):
        store.with_transaction(transaction)[f"layer/{number:04}/w"] = b"%d" % number
    transaction.commit_sync()
    monkeypatch.setattr(ocdbt, "_ROWS_FROM", 1)
    rows: Any = ocdbt.read_entries(location_of(tmp_path))
    assert rows.get(b"layer/0099/w") == b"99"
    assert [rows.get(b"~" * at + b"layer/0099/w"[at:]) for at in range(1, 12)] == [None] * 11
