"""The unpacker of small files and the parser of large ones agree, on damaged files too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import flax.serialization
import msgpack
import numpy as np
import pytest
from flax_ckpt_compat.legacy import BACKEND, format, reader, unpack_small_files
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat._core.backend import ArraySlice
from flax_ckpt_compat._core.errors import CorruptCheckpointError, StorageError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import KeyData, iter_branches, iter_leaves
from tests.legacy.test_hostile import _DOCUMENTS, _HOSTILE, _damaged
from tests.support.profiles import examples
from tests.support.trees import fingerprint, state_dicts


@pytest.fixture(autouse=True)
def any_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unpacker takes files with few arrays too."""
    monkeypatch.setattr(unpack_small_files, "_MIN_ARRAYS", 0)


def describe(opened: Any) -> Any:
    """Everything that a reader tells of its tree, and all values."""
    leaves = [leaf for _, leaf in iter_leaves(opened.tree) if hasattr(leaf, "locator")]
    fields = [(leaf.path, leaf.name, leaf.kind, leaf.shape, leaf.dtype, leaf.nbytes) for leaf in leaves]
    values = [fingerprint(value) for value in opened.read(leaves)]
    branches = [(path, list(one.children), one.container, one.int_keys) for path, one in iter_branches(opened.tree)]
    return fields, values, branches


def agree(path: Path) -> bool:
    """Return whether the unpacker took the file; assert that the parser then reads the same."""
    opened = BACKEND.open(location_of(path))
    taken = [leaf for _, leaf in iter_leaves(opened.tree) if type(getattr(leaf, "locator", None)) is bytes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "unpack", lambda *_: None)
        assert describe(opened) == describe(BACKEND.open(location_of(path)))
    return bool(taken)


@pytest.mark.parametrize("small", [0, 40, 2**15])
@given(tree=state_dicts())
@settings(max_examples=examples(150), deadline=None)
def test_files_of_flax(scratch: Any, small: int, tree: Any) -> None:
    """Trees of all leaves, of arrays that share memory and of others that do not."""
    path = scratch()
    path.write_bytes(flax.serialization.to_bytes(tree))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_SMALL", small)
        agree(path)
    path.unlink()


@given(document=st.one_of(_damaged(), st.binary(max_size=60), st.sampled_from([*_DOCUMENTS])))
@settings(max_examples=examples(1500), deadline=None)
def test_damaged_files(scratch: Any, document: bytes) -> None:
    """Nothing that the parser refuses is unpacked."""
    path = scratch()
    path.write_bytes(document or b"\xc0")
    try:
        agree(path)
    except CorruptCheckpointError:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CorruptCheckpointError):
            patch.setattr(reader, "unpack", lambda *_: None)
            BACKEND.open(location_of(path))
    path.unlink()


@pytest.mark.parametrize(("document", "message"), _HOSTILE.values(), ids=_HOSTILE.keys())
def test_hostile_files(load_bytes: Any, document: bytes, message: str) -> None:
    """Damage is named as in large files."""
    with pytest.raises(CorruptCheckpointError, match=message):
        load_bytes(document)


ODD = {
    "int keys": {1: np.ones(2), -1: 3, -200: 4, "b": 2},
    "list": {"a": [np.ones(2)]},
    "empty list": {"a": []},
    "bytes": {"a": b"x" * 300, "e": b""},
    "deep": None,
}


@pytest.mark.parametrize("name", ODD)
def test_what_flax_never_writes(scratch: Any, name: str) -> None:
    """Lists, int keys and depth come out alike."""
    path = scratch()
    if name == "deep":  # written out, as old packers refuse the depth
        path.write_bytes(b"\x81\xa1a" * format.MAX_DEPTH + b"\x07")
    else:
        path.write_bytes(msgpack.packb(ODD[name], default=flax.serialization._msgpack_ext_pack))
    agree(path)


def test_one_level_too_many(scratch: Any) -> None:
    """The bound on nested containers holds for small files too."""
    path = scratch()
    path.write_bytes(b"\x81\xa1a" * (format.MAX_DEPTH + 1) + b"\x07")
    with pytest.raises(CorruptCheckpointError, match=f"more than {format.MAX_DEPTH} nested containers"):
        BACKEND.open(location_of(path))


def test_same_length_of_another_header(scratch: Any) -> None:
    """Arrays of the same size in other shapes, and scalars with the bytes of arrays, are told apart."""
    shapes = [(2, 3), (3, 2), (6,), (1, 6), (6, 1)] * 5
    tree = {f"a{n:02}": np.arange(6, dtype="f4").reshape(shape) + n for n, shape in enumerate(shapes)}
    tree |= {"s": np.float32(1), "z": np.full((), 2, "f4"), "y": np.float32(3), "x": np.full((), 4, "f4")}
    path = scratch()
    path.write_bytes(flax.serialization.to_bytes(tree))
    assert agree(path)


def test_prng_keys(save: Any, load: Any) -> None:
    """A PRNG key among arrays is a key."""
    key = KeyData("threefry2x32", np.arange(2, dtype=np.uint32))
    path = save({"a": {"k": key, "w": np.ones(3)}, "k": key})
    assert agree(path)
    assert fingerprint(load(path)["k"]) == fingerprint(key)


@pytest.mark.parametrize(("size", "whole"), [(10, True), (2000, False)])
def test_only_many_small_arrays_are_read_whole(
    save: Any, monkeypatch: pytest.MonkeyPatch, size: int, whole: bool
) -> None:
    """A file of larger arrays, or a large file, is read in windows."""
    monkeypatch.undo()
    path = save({f"a{n:03}": np.zeros(size) for n in range(300)})
    opened = BACKEND.open(location_of(path))
    assert (type(next(iter(opened.tree.children.values())).locator) is bytes) == whole
    monkeypatch.setattr(unpack_small_files, "_MAX_SIZE", 1000)
    opened = BACKEND.open(location_of(path))
    assert type(next(iter(opened.tree.children.values())).locator) is format.FileRanges


@pytest.mark.parametrize("small", [3, 500])
def test_a_large_array_after_small_ones_is_not_read_on_opening(
    save: Any, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """Only the structure is read, and a sample of the file."""
    monkeypatch.undo()
    path = save({f"a{n:03}": np.full(small, n) for n in range(40)} | {"w": np.zeros(1 << 20)})
    read = 0
    pread = os.pread

    def counted(fd: int, count: int, offset: int) -> bytes:
        nonlocal read
        read += len(data := pread(fd, count, offset))
        return data

    monkeypatch.setattr(os, "pread", counted)
    BACKEND.open(location_of(path))
    assert read < (1 << 23) / 8


def test_a_large_array_among_small_ones_is_mapped(save: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the file is parsed, and the array read into place, or mapped if that is asked for."""
    monkeypatch.undo()
    tree = {f"a{n:03}": np.full(3, n) for n in range(300)} | {"w": np.arange(9000)}
    opened = BACKEND.open(location_of(save(tree)))
    leaf = opened.tree.children["w"]
    (mapped,) = opened.read([leaf], mapped=True)
    np.testing.assert_array_equal(mapped, tree["w"])
    assert mapped.base is not None and mapped.ctypes.data % 64 == (leaf.locator.ranges[0][0] % 64)


@pytest.mark.parametrize("index", [(slice(1, 3), slice(0, 4)), (slice(0, 4), slice(2, 3)), (slice(2, 2), slice(0, 4))])
def test_slices(save: Any, index: tuple[slice, ...]) -> None:
    """Slices of unpacked arrays have the values that numpy's have."""
    array = np.arange(16).reshape(4, 4)
    opened = BACKEND.open(location_of(save({"a": array, "b": array})))
    leaf = opened.tree.children["a"]
    part, whole = opened.read([ArraySlice(leaf, index), leaf])
    np.testing.assert_array_equal(part, array[index])
    np.testing.assert_array_equal(whole, array)


def test_values_stay_as_they_were_on_opening(save: Any) -> None:
    """A file that is cut after it was opened is read whole, and a closed reader is an error."""
    path = save({"a": {"w": np.ones(100)}})
    opened = BACKEND.open(location_of(path))
    os.truncate(path, 10)
    leaf = opened.tree.children["a"].children["w"]
    assert leaf.read().tolist() == [1] * 100
    opened.close()
    with pytest.raises(StorageError, match="closed"):
        leaf.read()


@pytest.mark.parametrize(
    "document",
    [
        {"t": {f"k{n}": n for n in range(30_000)}},
        {"t": {f"{n}": n / 7 for n in range(20_000)}},
        {"t": list(range(-10_000, 10_000))},
        {"t": {f"l{n}": dict.fromkeys("abcdefgh", True) for n in range(5000)}},
        {"t": {f"{n}": "word" for n in range(20_000)}, "none": None},
    ],
    ids=["ints", "floats", "a list", "nested", "text"],
)
def test_many_values_are_unpacked_at_once(document: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of many Python values take the fast way, though they have no arrays; the parser reads the same."""
    monkeypatch.setattr(unpack_small_files, "_MIN_ARRAYS", 16)
    path = tmp_path / "file"
    path.write_bytes(msgpack.packb(document))
    unpacked, unpack = list[Any](), unpack_small_files.unpack
    monkeypatch.setattr(reader, "unpack", lambda *given: unpacked.append(unpack(*given)) or unpacked[-1])
    opened = BACKEND.open(location_of(path))
    assert len(list(iter_leaves(opened.tree))) >= 20_000
    assert unpacked[-1] is not None
    agree(path)


def test_a_list_that_announces_more_than_it_has(tmp_path: Path) -> None:
    """It is damaged, and takes no memory for what it announces."""
    path = tmp_path / "file"
    path.write_bytes(b"\x81\xa1t" + b"\x91" * 200 + b"\xdd\x00\x3f\xff\xff" + bytes(5000))
    with pytest.raises(CorruptCheckpointError):
        BACKEND.open(location_of(path)).tree  # noqa: B018
