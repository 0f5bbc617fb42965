"""Files are byte for byte what Flax writes; what they cannot hold is refused before anything is written."""

import functools
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

from flax_ckpt_compat._core.backend import Format, WriteOptions
from flax_ckpt_compat._core.errors import UnsupportedLeafError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import Branch, HostCopy, KeyData, Shard, iter_leaves
from flax_ckpt_compat._discovery.formats import backend_for
from tests.legacy.conftest import restore
from tests.support.profiles import examples
from tests.support.trees import fill, fingerprint, state_dicts


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
    **{
        name: functools.partial(_of_jax, name)
        for name in ("float32", "bfloat16", "int4", "float8_e5m2", "bool", "complex64")
    },
    "odd corners of numpy": {"a": np.str_(""), "b": np.bytes_(b""), "e": bytearray(b"x")},
    # One batch of them has more pieces than a system call takes.
    "arrays of a page or more": {f"{n:03}": np.full(2**11, n) for n in range(os.sysconf("SC_IOV_MAX") // 2 + 88)},
}


@pytest.mark.parametrize("name", _EXAMPLES)
def test_examples_equal_flax(save, name):
    """What random trees seldom are is stored as Flax stores it."""
    tree = _EXAMPLES[name]() if callable(_EXAMPLES[name]) else _EXAMPLES[name]
    assert save(tree).read_bytes() == flax.serialization.to_bytes(tree)


# Limits so small that arrays of a few bytes take every way that large ones take.
_TINY = {"_BLOCK": 24, "_MIN_SHARDED": 1, "_COPY_BELOW": 1}
_WAYS = {
    **{f"chunks of {limit}": {"MAX_CHUNK_SIZE": limit} for limit in (10, 64, 100)},
    "tiny blocks": _TINY,
    "tiny blocks, chunks of 50": {**_TINY, "MAX_CHUNK_SIZE": 50},
    "batches": {"_BATCH": 4096, "_COPY_BELOW": 16, "_MAX_PIECES": 7},
    "short writes": {"writev": 1009},
}


def _sharded(cuts):
    """A copy of an array in so many shards, as a background save makes it."""
    array = np.arange(8 * 12, dtype=np.int16).reshape(8, 12)
    rows, columns = (range(0, length, length // count) for length, count in zip(array.shape, cuts, strict=True))
    boxes = [
        (slice(row, row + rows.step), slice(column, column + columns.step))
        for row, column in itertools.product(rows, columns)
    ]
    return HostCopy(array.shape, array.dtype, tuple(Shard(box, array[box].copy()) for box in boxes), None)


def _arrays():
    """Arrays of every kind of shape, in and out of C order, in shards, and longer than a batch."""
    shapes = [(), (7,), (3, 5), (250,), (2, 0, 4), (5, 6, 7), (1, 1, 90), (1, 40, 2)]
    for dtype, shape in itertools.product(map(np.dtype, ("f4", "c16", "u1", "U40", jnp.bfloat16)), shapes):
        array = fill(shape, dtype, 1)
        yield from (array, array.T, *([array[::-1], array[..., ::2]] if shape else []))
    yield from ("x" * 9000, *(np.arange(size, dtype=np.uint16) for size in (3000, 9000, 50000)))


@pytest.mark.parametrize("way", _WAYS)
def test_arrays_equal_flax(save, monkeypatch, way):
    """Whatever their layout and the limits, over which they are split as Flax does it; they come back whole."""
    for name, value in _WAYS[way].items():
        if name == "writev":  # a system that takes a part of the first piece
            write = os.write
            monkeypatch.setattr(os, name, lambda fd, pieces: write(fd, pieces[0][:value]))  # noqa: B023
        for module in (encode, format, flax.serialization):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    trees = [{str(number): leaf for number, leaf in enumerate(_arrays())}, np.arange(250.0), np.array(1j)]
    for tree in trees:
        path = save(tree)
        assert path.read_bytes() == flax.serialization.to_bytes(tree)
        assert fingerprint(restore(path)) == fingerprint(tree)
    copies = {str(cuts): _sharded(cuts) for cuts in [(1, 1), (2, 3), (1, 6), (4, 1), (4, 6)]}
    array = np.arange(8 * 12, dtype=np.int16).reshape(8, 12)
    assert save(copies).read_bytes() == flax.serialization.to_bytes(dict.fromkeys(copies, array))


class _Int(int):
    """An int of another type, which Flax's strict packing refuses too."""


class _Str(str):
    """A str of another type."""

    __slots__ = ()


# What no checkpoint can hold, and what a msgpack file alone cannot.
_REFUSED = {
    "object": np.array([None]),
    "record": np.zeros(2, "i4,i4"),
    "void": np.zeros(2, "V2"),
    "void scalar": np.void(b"ab"),
    "masked": np.ma.array([1, 2], mask=[0, 1]),
    "abstract": jax.ShapeDtypeStruct((2,), jnp.float32),
    "int too large": 2**64,
    "int too small": -(2**63) - 1,
    "set": {1},
    "instance": object(),
    "type": int,
}
_REFUSED_IN_A_FILE = {
    "key": jax.random.key(0),
    "int subclass": _Int(1),
    "str subclass": _Str("a"),
    "surrogate": "\ud800",
    "tuple": (1, 2),
    "placeholder": format.PLACEHOLDER + "a",
    "chunks": Branch(dict.fromkeys(format.CHUNK_KEYS, 1)),
    "prng": Branch(dict.fromkeys(format.KEY_KEYS, 1)),
    "key data": KeyData("rbg", np.zeros(2, np.int32)),
    "key impl": KeyData("\ud800", np.zeros(2, np.uint32)),
    "child key": Branch({"\udc00": 1}),
}


@pytest.mark.parametrize(
    ("backend", "name"),
    [*itertools.product(Format, _REFUSED), *((Format.MSGPACK, name) for name in _REFUSED_IN_A_FILE)],
    ids=str,
)
def test_refused_with_path(backend, name):
    """The error names the leaf by its key path; a bare leaf is the root."""
    leaf, prepare = {**_REFUSED, **_REFUSED_IN_A_FILE}[name], backend_for(backend).prepare
    with pytest.raises(UnsupportedLeafError, match="params/x") as caught:
        prepare(Branch({"a": 1, "params": Branch({"x": leaf})}))
    assert caught.value.leaf.startswith("params/x")
    with pytest.raises(UnsupportedLeafError, match="<root>"):
        prepare(object())


def test_deep_tree(scratch):
    """The deepest tree that is accepted can be written and read; a deeper one is refused."""
    path, plain, branches = scratch(), 7, 7
    for _ in range(format.MAX_DEPTH - 1):
        plain, branches = {"a": plain}, Branch({"a": branches})
    BACKEND.write(str(path), BACKEND.prepare(branches), WriteOptions())
    assert path.read_bytes() == msgpack.packb(plain)
    ((names, leaf),) = iter_leaves(BACKEND.open(location_of(path)).tree)
    assert (len(names), leaf.read()) == (format.MAX_DEPTH - 1, 7)
    path.write_bytes(b"\x81\xa1a" * format.MAX_DEPTH + b"\x07")  # read to the last level
    ((names, _),) = iter_leaves(BACKEND.open(location_of(path)).tree)
    assert len(names) == format.MAX_DEPTH
    with pytest.raises(UnsupportedLeafError, match="deeper"):
        BACKEND.prepare(Branch({"a": branches}))
