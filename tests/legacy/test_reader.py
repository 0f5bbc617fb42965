"""What is restored equals what was saved and what Flax restores, and only the bytes asked for are read."""

from __future__ import annotations

import gc
import itertools
import os

import flax.serialization
import msgpack
import numpy as np
import pytest
from flax_ckpt_compat.legacy import BACKEND, format

from flax_ckpt_compat._core.backend import ArraySlice
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.location import location_of
from tests.support.trees import fingerprint


@pytest.mark.parametrize(("limit", "whole"), [(2**30, 0), (2**30, 2**23), (3000, 0)])
def test_slices_are_those_of_numpy(save, limit, whole, monkeypatch):
    """Ranges on any axes, contiguous in the file or not, of arrays in one piece, read with the structure, in chunks."""
    monkeypatch.setattr(format, "MAX_CHUNK_SIZE", limit)
    monkeypatch.setattr("flax_ckpt_compat.legacy.reader._WHOLE", whole)
    array = np.arange(2 * 3 * 5 * 400.0).reshape(2, 3, 5, 400)
    reader = BACKEND.open(location_of(save({"a": array})))
    ranges = [[slice(0, length), slice(0, 1), slice(1, length)] for length in array.shape]
    parts = [ArraySlice(reader.tree.children["a"], index) for index in itertools.product(*ranges)]
    assert np.array_equal(reader.read([parts[0], parts[0].handle])[1], array)
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
        # A map that is not exactly as Flax writes arrays in pieces, or as we write keys, is the user's own.
        ({**_CHUNKS, "more": 1}, True),
        ({**_CHUNKS, "__msgpack_chunked_array__": 1}, True),
        ({**_CHUNKS, "shape": {"0": 3.0}}, True),
        ({**_CHUNKS, "shape": [3]}, True),
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


def test_longdouble(save, load):
    """Long doubles keep every digit, as arrays and as scalars; their padding is nobody's."""
    tree = {"a": np.ones(3, "g") / 3, "s": np.longdouble(2) / 3}
    restored = load(save(tree))
    np.testing.assert_array_equal(restored["a"], tree["a"])
    assert type(restored["s"]) is np.longdouble
    assert restored["s"] == tree["s"]


_MIXED = {"0": np.ones(2, "f4"), "1": np.ones(1, "i4")}  # bytes of one would be read as values of the other


@pytest.mark.parametrize("change", [*({"shape": shape} for shape in ({"0": 4}, {"0": -1}, {})), {"chunks": _MIXED}])
def test_chunks_that_do_not_add_up(load_bytes, change):
    """Pieces that are too many or too few for the shape, or of several dtypes, are an error that names the leaf."""
    with pytest.raises(CorruptCheckpointError, match=r"pieces of (12 bytes|different dtypes).* a"):
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
