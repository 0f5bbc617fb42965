"""Small files are unpacked at once, others parsed through a window; every way reads what real Flax reads."""

import gc
import itertools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import msgpack
import numpy as np
import pytest
from flax_ckpt_compat.legacy import BACKEND, find_arrays, format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.errors import CheckpointError, CorruptCheckpointError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import iter_branches, iter_leaves
from tests.legacy.conftest import restore
from tests.support.profiles import examples
from tests.support.trees import ML_DTYPES, arrays, fingerprint, numbers, state_dicts

_WINDOWS = {"legacy.reader._WHOLE": 0, "legacy.reader._WHOLE_OBJECT": 0}
_OBJECT = {"_core.local.local_file.LocalFile.is_local": False, "legacy.find_arrays._PART": 1000}
_SHORT, _LARGE = find_arrays.WindowSizes(3000, 3000, 0, 1), find_arrays.WindowSizes(8192, 8192, 2**30, 1)
WAYS: dict[str, dict[str, Any]] = {
    "at once": {},
    "by windows": _WINDOWS,
    "by windows that end anywhere": _WINDOWS | {"legacy.find_arrays.OF_FILES": _SHORT},
    "by windows over all": _WINDOWS | {"legacy.find_arrays.OF_FILES": _LARGE},
    "by single reads": _WINDOWS | {"legacy.reader._SMALL": 40},
    "an object in parts": _OBJECT,
    "an object by windows": _OBJECT | _WINDOWS,
}


def use(way: str, patch: pytest.MonkeyPatch) -> None:
    """Read in one of the ways from now on."""
    for name, value in WAYS[way].items():
        patch.setattr(f"flax_ckpt_compat.{name}", value)


def describe(path: Path) -> Any:
    """Everything that a reader tells of its tree, and all values; or its error."""
    try:
        opened = BACKEND.open(location_of(path))
    except CorruptCheckpointError as error:
        return str(error)
    leaves = [leaf for _, leaf in iter_leaves(opened.tree) if hasattr(leaf, "locator")]
    fields = [(leaf.path, leaf.name, leaf.kind, leaf.shape, leaf.dtype, leaf.nbytes) for leaf in leaves]
    values = [fingerprint(value) for value in opened.read(leaves)]
    branches = [(at, list(one.children), one.container, one.int_keys) for at, one in iter_branches(opened.tree)]
    return fields, values, branches


def check(path: Path, document: bytes) -> None:
    """Assert that all ways read a file alike, and as real Flax if they read it."""
    path.write_bytes(document)
    found = []
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            use(way, patch)
            found.append(describe(path))
    assert all(one == found[0] for one in found)
    try:
        restored = restore(path)
    except CheckpointError:
        return
    finally:
        path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = flax.serialization.msgpack_restore(document)
        except (ValueError, TypeError) as error:  # an older Flax refuses int keys, and every one arrays of text
            assert "strict_map_key" in str(error) or "not understood" in str(error)
            return
    assert fingerprint(restored) == fingerprint(expected)


_NUMBERS = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.integers(0, 127), st.floats(allow_nan=False), st.booleans(), st.none()
)
_ARRAYS = arrays([*map(np.dtype, ["?", "i4", "f8", "D", "M8[s]"]), *ML_DTYPES])
_TEXTS = st.one_of(st.text("ab/", max_size=40), st.sampled_from(["long " * 60, "ü" * 300, "x" * 70_000]))
_VALUES = st.one_of(
    _NUMBERS, numbers(), _ARRAYS, _TEXTS, st.binary(max_size=300), st.complex_numbers(allow_nan=False),
    st.sampled_from([np.float32(2), np.ones(700), np.ones((9000, 1, 1), "i1")]),
)  # fmt: skip
_NAMES = st.one_of(st.text("abé/", max_size=40), st.integers(-(2**63), 2**64 - 1))


def _containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Short lists and dicts of anything, and long ones of few numbers, repeated, with others at the end."""
    runs = st.tuples(st.lists(_NUMBERS, min_size=1, max_size=3), st.integers(6, 20)).map(lambda pair: pair[0] * pair[1])
    named = runs.map(lambda row: {f"k{n}": value for n, value in enumerate(row)})
    mixed = st.tuples(runs, st.lists(values, max_size=3)).map(lambda pair: [*pair[0], *pair[1]])
    return st.one_of(st.lists(values, max_size=4), st.dictionaries(_NAMES, values, max_size=6), runs, named, mixed)


def _packed(tree: Any) -> bytes:
    return bytes(msgpack.packb(tree, default=flax.serialization._msgpack_ext_pack, strict_types=True))


_DOCUMENTS = st.recursive(_VALUES, _containers, max_leaves=16).map(_packed)


_TREES = [
    {"a": np.arange(3, dtype="i4"), "b": {"c": np.ones((2, 3), "f4"), "d": np.ones((2, 3), "f4")}, "n": None},
    {"s": "text", "y": b"bytes" * 60, "i": [1, -5, 300, 2**40], "f": 1.5, "z": 1j, "t": True, "e": {}, "u": {"0": 1}},
    {"x": np.float32(3), "q": np.bool_(True), "m": np.zeros((), "D"), "o": np.zeros((0, 4)), "l": [[1, {}], []]},
    {"n": {f"k{n}": n for n in range(20)}, "l": list(range(30))},
    np.arange(20, dtype="u2"),
]
_WHOLE = [flax.serialization.msgpack_serialize(tree) for tree in _TREES]


@st.composite
def _damaged(draw: Any) -> bytes:
    document = bytearray(draw(st.one_of(st.sampled_from(_WHOLE), _DOCUMENTS)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(document) - 1))
        value = draw(st.one_of(st.integers(0, 255), st.sampled_from([0x80, 0x90, 0xC1, 0xC7, 0xC9, 0xDB, 0xDF])))
        edit = draw(st.sampled_from(["set", "set", "set", "insert", "delete", "cut"]))
        if edit == "set":
            document[at] = value
        elif edit == "insert":
            document.insert(at, value)
        elif len(document) > 1:
            del document[at : at + 1 if edit == "delete" else None]
        document = document or bytearray(b"\xc0")
    return bytes(document)


@given(
    drawn=st.one_of(
        state_dicts().map(lambda tree: (flax.serialization.to_bytes(tree), tree)),
        # Lists, int keys and long runs of numbers, which Flax writes for no state dict, but reads; damage and noise.
        st.tuples(st.one_of(_DOCUMENTS, _damaged(), st.binary(min_size=1, max_size=60))),
    )
)
@settings(max_examples=examples(4500, 120), deadline=None, suppress_health_check=[HealthCheck.data_too_large])
def test_what_flax_reads(scratch: Callable[[], Path], drawn: tuple[bytes, Any] | tuple[bytes]) -> None:
    """All ways give what real Flax makes of a document, or the same one of our errors; every tree comes back."""
    document, *tree = drawn
    path = scratch()
    path.write_bytes(document)
    assert not tree or fingerprint(restore(path)) == fingerprint(tree[0])
    check(path, document)


@pytest.mark.parametrize("document", _WHOLE)
def test_every_truncation(load_bytes: Callable[[bytes], Any], document: bytes) -> None:
    """A file cut at any byte is an error."""
    for length in range(len(document)):
        with pytest.raises(CorruptCheckpointError):
            load_bytes(document[:length])


def _ext(code: int, *fields: Any) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, msgpack.packb(fields))))


_ARRAY = _ext(1, (2,), "int32", bytes(8))
# Two arrays of the same header, after which more of them are read in a loop of their own.
_TWO = b"\x83\xa1a" + _ARRAY + b"\xa1b" + _ARRAY
_HOSTILE = {
    "third key utf-8": (_TWO + b"\xa1\xff" + _ARRAY, "utf-8"),
    "third key twice": (_TWO + b"\xa1b" + _ARRAY, "'b' twice"),
    "third array cut": (_TWO + b"\xa1c" + _ARRAY[:-1], "truncated"),
    "no third key": (_TWO, "truncated"),
    "empty": (b"", "empty"),
    "unused byte": (b"\x81\xa1a\xc1", "byte 3: .*0xc1"),
    "trailing": (b"\x01\x02", "byte 1: .*1 bytes behind"),
    "no value": (b"\x81\xa1a", "truncated"),
    "no key": (b"\x82\xa1a\x01", "truncated"),
    "cut int": (b"\xcf\x00", "truncated"),
    "cut float": (b"\xcb\x00\x00", "truncated"),
    "cut length": (b"\xc6\x00\x00", "truncated"),
    "cut ext": (b"\xc8\x00", "truncated"),
    "cut fixext": (b"\xd4", "truncated"),
    "long text": (b"\xdb\xff\xff\xff\xff", "4294967295 bytes.*truncated"),
    "long bytes": (b"\xc6\xff\xff\xff\xff", "4294967295 bytes.*truncated"),
    "long ext": (b"\xc9\xff\xff\xff\xff\x01", "4294967295 bytes.*truncated"),
    "long array": (b"\xdd\xff\xff\xff\xff", "4294967295 values.*truncated"),
    "long map": (b"\xdf\xff\xff\xff\xff", "4294967295 values.*truncated"),
    "deep": (b"\x91" * 100_000 + b"\x90", r"byte \d{4}: .*nested"),
    "deep maps": (b"\x81\xa1a" * 100_000 + b"\x80", r"byte \d{4}: .*nested"),
    "key utf-8": (b"\x81\xa1\xff\x01", "utf-8"),
    "text utf-8": (b"\xa2\xed\xa0", "utf-8"),
    "twice": (b"\x82\xa1a\x01\xa1a\x02", "'a' twice"),
    "int and text": (b"\x82\xa11\x01\x01\x02", "'1' twice"),
    "bytes key": (b"\x81\xc4\x01a\x01", "neither text nor int"),
    "nil key": (b"\x81\xc0\x01", "neither text nor int"),
    "list key": (b"\x81\x90\x01", "neither text nor int"),
    "unknown ext": (b"\xd4\x05a", "extension code 5"),
    "timestamp": (b"\xd6\xff\x00\x00\x00\x01", "extension code 255"),
    "short data": (_ext(1, (3,), "int32", bytes(8)), "need 12 bytes, not 8"),
    "long data": (_ext(1, (), "int32", bytes(8)), "need 4 bytes, not 8"),
    "negative": (_ext(1, (-1,), "int32", bytes(8)), "not a shape"),
    "not whole": (_ext(1, (2.0,), "int32", bytes(8)), "not a shape"),
    "bool size": (_ext(1, (True,), "int32", bytes(4)), "not a shape"),
    "huge": (_ext(1, (2**62, 2**62), "int32", bytes(8)), "need"),
    "huge empty": (_ext(1, (0, 2**62, 2**62), "int32", b""), "does not decode"),
    "many sizes": (_ext(1, (1,) * 65, "int8", b"a"), "not a shape"),
    "bad dtype": (_ext(1, (2,), "int33", bytes(8)), "int33"),
    "object": (_ext(1, (1,), "O", bytes(8)), "'O'"),
    "record": (_ext(1, (1,), "i4,i4", bytes(8)), "i4,i4"),
    "void": (_ext(1, (1,), "V8", bytes(8)), "V8"),
    "no size": (_ext(1, (1,), "S0", b""), "need 0 bytes"),
    "dtype text": (_ext(1, (1,), "int\u00e9", bytes(8)), "does not decode"),
    "dtype nil": (_ext(1, (1,), None, bytes(8)), "not a dtype name"),
    "two fields": (_ext(1, (1,), "int32"), "three fields"),
    "data is int": (_ext(1, (1,), "int32", 5), "msgpack type 0x05"),
    "inner tail": (msgpack.packb(msgpack.ExtType(1, msgpack.packb([[1], "int8", b"a"]) + b"x")), "payload"),
    "inner cut": (msgpack.packb(msgpack.ExtType(1, b"\x93\x91")), "does not decode"),
    "scalar data": (_ext(3, (), "int32", bytes(5)), "need 4 bytes, not 5"),
    "one level too many": (b"\x81\xa1a" * (format.MAX_DEPTH + 1) + b"\x07", f"more than {format.MAX_DEPTH} nested"),
    # No memory is taken for what it announces.
    "announces more": (b"\x81\xa1t" + b"\x91" * 200 + b"\xdd\x00\x3f\xff\xff" + bytes(5000), "expected a Flax msgpack"),
    "complex": (_ext(2, 1.0), "not a complex"),
    "complex text": (_ext(2, "a", "b"), "not a complex"),
    "complex empty": (msgpack.packb(msgpack.ExtType(2, b"")), "not a complex"),
}


@pytest.mark.parametrize("way", ["at once", "by windows"])
@pytest.mark.parametrize(("document", "message"), _HOSTILE.values(), ids=_HOSTILE.keys())
def test_named_error(way: str, document: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of damage is named, with the file and, where there is one, the byte."""
    use(way, monkeypatch)
    (tmp_path / "file").write_bytes(document)
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        restore(tmp_path / "file")
    assert caught.value.path == str(tmp_path / "file") in str(caught.value)


def test_same_length_of_another_header(scratch: Callable[[], Path]) -> None:
    """Arrays of the same size in other shapes, and scalars with the bytes of arrays, are told apart."""
    shapes = [(2, 3), (3, 2), (6,), (1, 6), (6, 1)] * 5
    tree = {f"a{n:02}": np.arange(6, dtype="f4").reshape(shape) + n for n, shape in enumerate(shapes)}
    # Of one length and with one first axis, only the names of the dtypes differ.
    tree |= {"t": np.arange(6, dtype="i2").reshape(2, 3), "u": np.arange(12, dtype="u1").reshape(2, 6)}
    tree |= {"s": np.float32(1), "z": np.full((), 2, "f4"), "y": np.float32(3), "x": np.full((), 4, "f4")}
    check(scratch(), flax.serialization.to_bytes(tree))


@pytest.mark.parametrize("way", ["at once", "by windows"])
def test_a_reference_among_numbers(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an array that is not there, and never its text."""
    use(way, monkeypatch)
    path = tmp_path / "checkpoint_1"
    path.write_bytes(_packed({"a": [*range(5_000), format.PLACEHOLDER + "a/5000"]}))
    with pytest.raises(CorruptCheckpointError, match=r"no array .*checkpoint_1_gda/a/5000"):
        flax_ckpt_compat.restore(path)


@pytest.mark.parametrize("target", [None, {"n": {f"k{n}": 0 for n in range(20)}, "l": [0] * 30, "w": np.zeros(2)}])
def test_the_result_is_the_callers_own(target: Any, tmp_path: Path) -> None:
    """Changing it changes no other result, with the values of another open checkpoint neither."""
    tree = {"n": {f"k{n}": n for n in range(20)}, "l": list(range(30)), "w": np.ones(2)}
    path = tmp_path / "file"
    path.write_bytes(_packed(tree))
    with flax_ckpt_compat.open_checkpoint(path) as view:
        for _ in range(2):
            restored = checkpoints.restore_checkpoint(path, target)
            assert fingerprint(restored) == fingerprint(tree)
            restored["n"]["k3"], restored["l"][4] = "changed", "changed"
            read = view.read()
            assert fingerprint(read) == fingerprint(tree)
            read["n"].clear()
            read["l"].clear()


@pytest.mark.parametrize(("limit", "whole"), [(2**30, 0), (2**30, 2**23), (3000, 0)])
def test_slices_are_those_of_numpy(save, limit, whole, monkeypatch):
    """Ranges on any axes, contiguous in the file or not, of arrays in one piece, read with the structure, in chunks."""
    monkeypatch.setattr(format, "MAX_CHUNK_SIZE", limit)
    monkeypatch.setattr("flax_ckpt_compat.legacy.reader._WHOLE", whole)
    array = np.arange(2 * 3 * 5 * 400.0).reshape(2, 3, 5, 400)
    reader = BACKEND.open(location_of(save({"a": array})))
    ranges = [[slice(0, length), slice(0, 1), slice(1, length)] for length in array.shape]
    parts = [reader.tree.children["a"].part(index) for index in itertools.product(*ranges)]
    assert np.array_equal(reader.read([parts[0], parts[0].whole])[1], array)
    for part, found in zip(parts, reader.read(parts), strict=True):
        np.testing.assert_array_equal(found, array[part.index])
    reader.close()


@pytest.mark.usefixtures("in_windows")
@pytest.mark.parametrize("size", [10, 2**20])
def test_file_cut_after_opening(save, size):
    """A file that shrinks between open and read is an error that names the leaf."""
    path = save({"a": {"w": np.zeros(size)}})
    reader = BACKEND.open(location_of(path))
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CorruptCheckpointError, match="a/w") as caught:
        reader.read([reader.tree.children["a"].children["w"]])
    assert caught.value.leaf == "a/w"


_KEY = {"__flax_ckpt_compat_prng_key__": "rbg", "data": np.zeros(2, np.uint32)}
_CHUNKS = {
    "__msgpack_chunked_array__": True,
    "shape": {"0": 3},
    "chunks": {"0": np.arange(2, dtype="f4"), "1": np.arange(1, dtype="f4")},
}


@pytest.mark.parametrize(
    ("node", "is_own"),
    [
        # Flax up to 0.8.5 wrote Python complex as a numpy scalar.
        (msgpack.ExtType(3, msgpack.packb(((), "complex128", np.complex128(1 + 2j).tobytes()))), False),
        # Pieces belong where their number says, wherever in the map they stand; those inside of lists are not joined.
        ({**_CHUNKS, "chunks": dict(reversed(_CHUNKS["chunks"].items()))}, False),
        ([_CHUNKS], False),
        ({**_CHUNKS, "chunks": {"0": np.arange(3.0)[None], "1": np.empty((0, 3))}}, False),  # of an np.matrix
        # A map that is not exactly as Flax writes arrays in pieces, or as we write keys, is the user's own.
        ({**_CHUNKS, "more": 1}, True),
        ({**_CHUNKS, "__msgpack_chunked_array__": 1}, True),
        *(({**_CHUNKS, "shape": shape}, True) for shape in ({"0": 3.0}, [3])),
        ({**_CHUNKS, "chunks": {}}, True),
        ({**_CHUNKS, "chunks": {"0": np.float32(1)}}, True),
        ({**_KEY, "__flax_ckpt_compat_prng_key__": 1}, True),
        ({**_KEY, "data": np.zeros(2, np.int32)}, True),
        ({**_KEY, "x": 1}, True),
    ],
)
def test_documents_of_flax(load_bytes, node, is_own):
    """They come back as real Flax restores them, and a user's own maps as they are."""
    document = msgpack.packb({"a": node}, default=flax.serialization._msgpack_ext_pack)
    expected = {"a": node} if is_own else flax.serialization.msgpack_restore(document)
    assert fingerprint(load_bytes(document)) == fingerprint(expected)


def test_longdouble(save):
    """Long doubles keep every digit, as arrays and as scalars; their padding is nobody's."""
    tree = {"a": np.ones(3, "g") / 3, "s": np.longdouble(2) / 3}
    restored = restore(save(tree))
    np.testing.assert_array_equal(restored["a"], tree["a"])
    assert type(restored["s"]) is np.longdouble
    assert restored["s"] == tree["s"]


_MIXED = {"0": np.ones(2, "f4"), "1": np.ones(1, "i4")}  # bytes of one would be read as values of the other
_HUGE = {"shape": {"0": 0, "1": 2**62}, "chunks": {"0": np.empty(0, "f4")}}


@pytest.mark.parametrize("change", [*({"shape": one} for one in ({"0": 4}, {"0": -1}, {})), {"chunks": _MIXED}, _HUGE])
def test_chunks_that_do_not_add_up(load_bytes, change):
    """Pieces that are too many or too few for the shape, or of several dtypes, are an error that names the leaf."""
    with pytest.raises(CorruptCheckpointError, match=r"(pieces of (12 bytes|different dtypes)|too big|dimension).* a"):
        load_bytes(flax.serialization.msgpack_serialize({"a": {**_CHUNKS, **change}}))


def test_readers_close_themselves(save):
    """A reader that is forgotten gives its descriptor back: of a file too large to be read whole."""
    path = save({"a": np.zeros(9 << 20, np.uint8)})
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        BACKEND.open(location_of(path))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before  # threads of other tests may have closed some
