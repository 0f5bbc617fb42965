"""Damaged and hostile files: Flax's result or a named error, never wrong data, never another exception."""

from __future__ import annotations

import warnings

import flax.serialization
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat._core.errors import CheckpointError, CorruptCheckpointError
from tests.support.profiles import examples
from tests.support.trees import fingerprint


def _ext(code, *fields):
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb(fields)))


_ARRAY = _ext(1, (2,), "int32", bytes(8))
# Two arrays of the same header, after which more of them are read in a loop of their own.
_TWO = b"\x83\xa1a" + _ARRAY + b"\xa1b" + _ARRAY
_HOSTILE = {
    "third key utf-8": (_TWO + b"\xa1\xff" + _ARRAY, f"byte {len(_TWO)}: .*UTF-8"),
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
    "deep": (b"\x91" * 100_000 + b"\x90", "nested"),
    "deep maps": (b"\x81\xa1a" * 100_000 + b"\x80", "nested"),
    "key utf-8": (b"\x81\xa1\xff\x01", "UTF-8"),
    "text utf-8": (b"\xa2\xed\xa0", "UTF-8"),
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
    "no size": (_ext(1, (1,), "S0", b""), "without a size"),
    "dtype text": (_ext(1, (1,), "int\u00e9", bytes(8)), "does not decode"),
    "dtype nil": (_ext(1, (1,), None, bytes(8)), "not a dtype name"),
    "two fields": (_ext(1, (1,), "int32"), "three fields"),
    "data is int": (_ext(1, (1,), "int32", 5), "msgpack type 0x05"),
    "inner tail": (msgpack.packb(msgpack.ExtType(1, msgpack.packb([[1], "int8", b"a"]) + b"x")), "payload"),
    "inner cut": (msgpack.packb(msgpack.ExtType(1, b"\x93\x91")), "does not decode"),
    "scalar data": (_ext(3, (), "int32", bytes(5)), "need 4 bytes, not 5"),
    "complex": (_ext(2, 1.0), "not a complex"),
    "complex text": (_ext(2, "a", "b"), "not a complex"),
    "complex empty": (msgpack.packb(msgpack.ExtType(2, b"")), "not a complex"),
}


@pytest.mark.parametrize(("document", "message"), _HOSTILE.values(), ids=_HOSTILE.keys())
def test_named_error(load_bytes, document, message):
    """Each kind of damage is named, with the file and, where there is one, the byte."""
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        load_bytes(document)
    assert caught.value.path is not None
    assert caught.value.path in str(caught.value)


_TREES = [
    {"a": np.arange(3, dtype="i4"), "b": {"c": np.ones((2, 3), "f4"), "d": np.ones((2, 3), "f4")}, "n": None},
    {"s": "text", "y": b"bytes" * 60, "i": [1, -5, 300, 2**40], "f": 1.5, "z": 1j, "t": True, "e": {}, "u": {"0": 1}},
    {"x": np.float32(3), "q": np.bool_(True), "m": np.zeros((), "D"), "o": np.zeros((0, 4)), "l": [[1, {}], []]},
    np.arange(20, dtype="u2"),
]
_DOCUMENTS = [flax.serialization.msgpack_serialize(tree) for tree in _TREES]


@st.composite
def _damaged(draw):
    document = bytearray(draw(st.sampled_from(_DOCUMENTS)))
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


def assert_as_flax(restored, document):
    """Asserts that it is what real Flax restores, if it restores the document."""
    try:
        expected = flax.serialization.msgpack_restore(document)
    except ValueError as error:
        assert "strict_map_key" in str(error)  # an older Flax refuses int keys
        return
    assert fingerprint(restored) == fingerprint(expected)


@given(document=_damaged())
@settings(max_examples=examples(1500), deadline=None)
def test_damaged_files(load_bytes, document):
    """A damaged file gives what real Flax makes of it, or one of our errors."""
    try:
        restored = load_bytes(document)
    except CheckpointError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_as_flax(restored, document)


@given(document=st.binary(max_size=60))
@settings(max_examples=examples(300), deadline=None)
def test_noise(load_bytes, document):
    """Noise gives what real Flax makes of it, or one of our errors."""
    try:
        restored = load_bytes(document)
    except CheckpointError:
        return
    assert_as_flax(restored, document)


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_every_truncation(load_bytes, document):
    """A file cut at any byte is an error."""
    for length in range(len(document)):
        with pytest.raises(CorruptCheckpointError):
            load_bytes(document[:length])
