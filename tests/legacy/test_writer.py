"""Files are byte for byte what Flax writes; what they cannot hold is refused before anything is written."""

from __future__ import annotations

import errno
import itertools
import os

import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from flax_ckpt_compat.legacy import BACKEND, encode, format
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat._core.backend import WriteOptions
from flax_ckpt_compat._core.errors import StorageError, UnsupportedLeafError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import Branch, HostCopy, KeyData, Shard, iter_leaves
from tests.support.profiles import examples
from tests.support.trees import ML_DTYPES, NUMPY_DTYPES, fill, fingerprint, state_dicts


@given(tree=state_dicts())
@settings(max_examples=examples(300), deadline=None)
def test_bytes_equal_flax(save, tree):
    """Every tree that Flax can write comes out with the same bytes."""
    path = save(tree)
    assert path.read_bytes() == flax.serialization.to_bytes(tree)
    path.unlink()


def _of_bytes(count):
    return {"a": np.arange(count % 251, count % 251 + count).astype(np.uint8), "b": np.zeros((count, 1, 2), "f4")}


def _of_jax(dtype):
    return {"a": jnp.arange(6).reshape(2, 3).astype(dtype), "b": jnp.zeros((), dtype), "c": jnp.zeros((0, 2), dtype)}


_EXAMPLES = {
    # Every boundary of the sizes of maps, and of arrays.
    **{f"{size} names": dict.fromkeys(map(str, range(size))) for size in (0, 1, 15, 16, 65535, 65536)},
    **{f"{n} bytes": _of_bytes(n) for n in (0, 1, 60, 230, 240, 255, 256, 65500, 65535, 65536, 70000)},
    **{name: _of_jax(name) for name in ("float32", "bfloat16", "int4", "float8_e5m2", "bool", "complex64")},
    "odd corners of numpy": {"a": np.str_(""), "b": np.bytes_(b""), "e": bytearray(b"x")},
    # One batch of them has more pieces than a system call takes.
    "arrays of a page or more": {f"{n:03}": np.full(2**11, n) for n in range(os.sysconf("SC_IOV_MAX") // 2 + 88)},
}


@pytest.mark.parametrize("name", _EXAMPLES)
def test_examples_equal_flax(save, name):
    """What random trees seldom are is stored as Flax stores it."""
    assert save(_EXAMPLES[name]).read_bytes() == flax.serialization.to_bytes(_EXAMPLES[name])


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (250,), (2, 0, 4)])
@pytest.mark.parametrize("dtype", ["f4", "c16", "u1", "U40"])
@pytest.mark.parametrize("limit", [1, 10, 64, 100])
def test_chunks_equal_flax(save, load, monkeypatch, shape, dtype, limit):
    """Arrays over the limit are split like Flax's, nested or bare, and come back whole."""
    monkeypatch.setattr(format, "MAX_CHUNK_SIZE", limit)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", limit)
    array = np.asarray(fill(shape, np.dtype(dtype), 1), order="F")
    for tree in (array, {"a": {"b": array}, "c": 1}):
        path = save(tree)
        assert path.read_bytes() == flax.serialization.to_bytes(tree)
        assert fingerprint(load(path)) == fingerprint(tree)


@pytest.mark.parametrize("dtype", [">i4", ">f8", ">c8", ">M8[s]", ">U2"])
def test_foreign_byte_order(save, load, dtype):
    """Big-endian arrays come back right, from us and from real Flax, which itself would mangle them."""
    array = np.arange(1, 7).astype(dtype[1:]).astype(dtype).reshape(2, 3)
    path = save({"a": array})
    for restored in (load(path)["a"], flax.serialization.msgpack_restore(path.read_bytes())["a"]):
        assert restored.dtype == array.dtype
        np.testing.assert_array_equal(restored, array)


def test_prng_key(save, load):
    """A typed PRNG key is a dict of its implementation and its data for Flax, and a key for us."""
    key = jax.random.key(3)
    data = np.asarray(jax.random.key_data(key))
    path = save({"k": KeyData("threefry2x32", jax.random.key_data(key))})
    stored = flax.serialization.msgpack_restore(path.read_bytes())["k"]
    assert stored[format.KEY_IMPL] == "threefry2x32"
    np.testing.assert_array_equal(stored["data"], data)
    assert fingerprint(load(path)) == fingerprint({"k": KeyData("threefry2x32", data)})


def test_deep_tree(scratch):
    """The deepest tree that is accepted can be written and read."""
    path, plain, branches = scratch(), 7, 7
    for _ in range(format.MAX_DEPTH - 1):
        plain, branches = {"a": plain}, Branch({"a": branches})
    BACKEND.write(str(path), BACKEND.prepare(branches), WriteOptions())
    assert path.read_bytes() == msgpack.packb(plain)
    ((names, leaf),) = iter_leaves(BACKEND.open(location_of(path)).tree)
    assert (len(names), leaf.read()) == (format.MAX_DEPTH - 1, 7)


def test_short_writes(save, load, monkeypatch):
    """A system that takes less than it is given still gets everything."""
    write = os.write  # takes part of the first piece, as writev may
    monkeypatch.setattr(os, "writev", lambda fd, pieces: write(fd, pieces[0][:1009]))
    tree = {"a": np.arange(50000), "b": "x" * 3000, "c": np.arange(9000)}
    assert save(tree).read_bytes() == flax.serialization.to_bytes(tree)


def test_batches(save, monkeypatch):
    """Arrays that cross the ends of batches, and more pieces than one call takes, come out whole."""
    monkeypatch.setattr(encode, "_BATCH", 4096)
    monkeypatch.setattr(encode, "_COPY_BELOW", 16)
    monkeypatch.setattr(encode, "_MAX_PIECES", 7)
    tree = {str(n): np.arange(n * 37 % 3000, dtype=np.uint16) for n in range(300)} | {"text": "y" * 9000}
    assert save(tree).read_bytes() == flax.serialization.to_bytes(tree)


def test_full_disk(scratch, monkeypatch):
    """A full disk is a StorageError that names the file and keeps the system's error."""

    def refuse(fd, pieces):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", refuse)
    path = str(scratch())
    with pytest.raises(StorageError, match="No space left") as caught:
        BACKEND.write(path, Branch({"a": np.zeros(3)}), WriteOptions())
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.path == path
    assert isinstance(caught.value.__cause__, OSError)


def test_never_overwrites(save):
    """Writing onto an existing file is refused and leaves it as it was."""
    path = save({"a": 1})
    before = path.read_bytes()
    with pytest.raises(StorageError, match=str(path)):
        BACKEND.write(str(path), Branch({"a": 2}), WriteOptions())
    assert path.read_bytes() == before


# Arrays out of C order and arrays in shards, which are written in blocks.

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@pytest.fixture
def tiny(monkeypatch):
    """Limits so small that arrays of a few bytes take every way that large ones take."""
    monkeypatch.setattr(encode, "_BLOCK", 24)
    monkeypatch.setattr(encode, "_MIN_SHARDED", 1)
    monkeypatch.setattr(encode, "_COPY_BELOW", 1)


@given(SHAPES, st.sampled_from(NUMPY_DTYPES + ML_DTYPES), st.permutations(range(4)), st.integers(1, 3))
def test_blocks_are_the_array_in_c_order(shape, dtype, order, step):
    """Joined, they are what numpy makes of the array, whatever its strides; each is small, or one element."""
    array = fill(shape, dtype, 1).transpose([axis for axis in order if axis < len(shape)])[::step]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_BLOCK", 24)
        pieces = list(encode.pieces(array))
    assert b"".join(piece.tobytes() for piece in pieces) == array.tobytes()
    assert array.flags.c_contiguous or all(piece.nbytes <= 24 or piece.size == 1 for piece in pieces)


@pytest.mark.parametrize("limit", [2**30, 50])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("shape", [(5, 6, 7), (1, 1, 90), (90,), (1, 40, 2)])
def test_bytes_of_strided_arrays_equal_flax(save, monkeypatch, tiny, shape, dtype, limit):
    """Transposed and strided arrays, in one piece or over Flax's limit."""
    monkeypatch.setattr(format, "MAX_CHUNK_SIZE", limit)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", limit)
    array = np.arange(np.prod(shape)).reshape(shape).astype(jax.numpy.dtype(dtype))
    tree = {"t": array.T, "s": array[..., ::2], "r": array[::-1], "c": array}
    assert save(tree).read_bytes() == flax.serialization.to_bytes(tree)


@pytest.mark.parametrize("limit", [2**30, 50])
@pytest.mark.parametrize("cuts", [(1, 1), (2, 3), (1, 6), (4, 1), (4, 6)])
def test_shards_of_a_background_save(save, monkeypatch, tiny, cuts, limit):
    """A copy, also one that lies in shards, is stored as the array that it was made of."""
    monkeypatch.setattr(format, "MAX_CHUNK_SIZE", limit)
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", limit)
    array = np.arange(8 * 12, dtype=np.int16).reshape(8, 12)
    rows, columns = 8 // cuts[0], 12 // cuts[1]
    boxes = [
        (slice(row, row + rows), slice(column, column + columns))
        for row, column in itertools.product(range(0, 8, rows), range(0, 12, columns))
    ]
    shards = tuple(Shard(box, array[box].copy()) for box in boxes)
    copy = HostCopy(array.shape, array.dtype, shards, None)
    assert save({"a": copy}).read_bytes() == flax.serialization.to_bytes({"a": array})


# What a file cannot hold.


class _Int(int):
    """An int of another type, which Flax's strict packing refuses too."""


class _Str(str):
    """A str of another type."""

    __slots__ = ()


_REFUSED = {
    "object": np.array([None]),
    "record": np.zeros(2, "i4,i4"),
    "void": np.zeros(2, "V2"),
    "void scalar": np.void(b"ab"),
    "masked": np.ma.array([1, 2], mask=[0, 1]),
    "key": jax.random.key(0),
    "int too large": 2**64,
    "int too small": -(2**63) - 1,
    "int subclass": _Int(1),
    "str subclass": _Str("a"),
    "surrogate": "\ud800",
    "tuple": (1, 2),
    "set": {1},
    "instance": object(),
    "type": int,
    "placeholder": format.PLACEHOLDER + "a",
    "chunks": Branch(dict.fromkeys(format.CHUNK_KEYS, 1)),
    "prng": Branch(dict.fromkeys(format.KEY_KEYS, 1)),
    "key data": KeyData("rbg", np.zeros(2, np.int32)),
    "key impl": KeyData("\ud800", np.zeros(2, np.uint32)),
    "child key": Branch({"\udc00": 1}),
}


@pytest.mark.parametrize("leaf", _REFUSED.values(), ids=_REFUSED.keys())
def test_refused_with_path(leaf):
    """The error names the leaf by its key path."""
    with pytest.raises(UnsupportedLeafError, match="params/x") as caught:
        BACKEND.prepare(Branch({"a": 1, "params": Branch({"x": leaf})}))
    assert caught.value.leaf.startswith("params/x")


def test_bare_leaf():
    """A bare leaf is named as the root."""
    with pytest.raises(UnsupportedLeafError, match="<root>"):
        BACKEND.prepare(object())


def test_too_deep():
    """A tree deeper than can be read back is refused."""
    tree = 1
    for _ in range(format.MAX_DEPTH):
        tree = Branch({"a": tree})
    with pytest.raises(UnsupportedLeafError, match="deeper"):
        BACKEND.prepare(tree)
