"""Files are byte for byte what Flax writes."""

from __future__ import annotations

import errno
import os

import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from flax_ckpt_compat.legacy import BACKEND, encode, format
from hypothesis import given, settings

from flax_ckpt_compat._core.backend import WriteOptions
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import Branch, Container, HostCopy, KeyData, iter_leaves
from tests.support.profiles import examples
from tests.support.trees import fill, fingerprint, state_dicts


@given(tree=state_dicts())
@settings(max_examples=examples(300), deadline=None)
def test_bytes_equal_flax(save, tree):
    """Every tree that Flax can write comes out with the same bytes."""
    path = save(tree)
    assert path.read_bytes() == flax.serialization.to_bytes(tree)
    path.unlink()


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65535, 65536])
def test_map_headers(save, count):
    """Maps have Flax's header at every boundary of their size."""
    tree = {f"{index}": None for index in range(count)}
    assert save(tree).read_bytes() == flax.serialization.to_bytes(tree)


@pytest.mark.parametrize("nbytes", [0, 1, 60, 230, 240, 255, 256, 65500, 65535, 65536, 70000])
def test_array_headers(save, nbytes):
    """Arrays have Flax's headers at every boundary of their size."""
    tree = {"a": np.arange(nbytes % 251, nbytes % 251 + nbytes).astype(np.uint8), "b": np.zeros((nbytes, 1, 2), "f4")}
    assert save(tree).read_bytes() == flax.serialization.to_bytes(tree)


def test_numpy_odd_corners(save):
    """Empty numpy text and bytearrays are stored as Flax stores them."""
    tree = {
        "a": np.str_(""),
        "b": np.bytes_(b""),
        "e": bytearray(b"x"),
    }
    assert save(tree).read_bytes() == flax.serialization.to_bytes(tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "float8_e5m2", "bool", "complex64"])
def test_jax_arrays(save, dtype):
    """jax arrays are stored as Flax stores them."""
    tree = {"a": jnp.arange(6).reshape(2, 3).astype(dtype), "b": jnp.zeros((), dtype), "c": jnp.zeros((0, 2), dtype)}
    assert save(tree).read_bytes() == flax.serialization.to_bytes(tree)


def test_host_copy(save):
    """A copy that was made for a background save is stored as the array it was made of."""
    array = jnp.arange(3.0)
    assert save({"a": HostCopy.whole(np.asarray(array), array.sharding)}).read_bytes() == flax.serialization.to_bytes(
        {"a": array}
    )


@pytest.mark.parametrize("container", list(Container))
def test_containers_are_maps(scratch, container):
    """Lists, tuples and namedtuples become maps, as in Flax's state dicts."""
    path = scratch()
    BACKEND.write(str(path), Branch({"0": 1, "1": Branch({}, container)}, container), WriteOptions())
    assert path.read_bytes() == flax.serialization.to_bytes([1, []])


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


def test_many_arrays_of_a_page_or_more(save):
    """One batch of them has more pieces than a system call takes (IOV_MAX)."""
    tree = {f"{number:03}": np.full(2**11, number) for number in range(600)}
    assert 2 * len(tree) > os.sysconf("SC_IOV_MAX")
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
