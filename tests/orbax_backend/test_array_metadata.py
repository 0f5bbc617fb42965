"""The metadata of an array: sizes that no array has, boxes that are chunks, and how large arrays are split."""

import json

import numpy as np
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import writer, zarr


def metadata(shape: list[int], chunks: list[int], dtype: str = "<f8") -> bytes:
    """A ``.zarray``."""
    return json.dumps({"dtype": dtype, "shape": shape, "chunks": chunks, "zarr_format": 2}).encode()


@pytest.mark.parametrize(
    ("shape", "chunks", "why"),
    [
        ([2**59], [1], "fits no memory"),
        ([0, 2**59], [1, 1], "fits no memory"),
        ([2**62], [1], "is not a shape"),
        ([-1], [1], "is not a shape"),
        ([True], [1], "is not a shape"),
        ([1] * 33, [1] * 33, "is not a shape"),
        ([4], [0], "is not a grid"),
        ([4], [2, 2], "is not a grid"),
    ],
)
def test_impossible_arrays(shape: list[int], chunks: list[int], why: str) -> None:
    """From 2**62 bytes on, where sizes and offsets no longer fit 64 bits, also of arrays without elements."""
    with pytest.raises(ValueError, match=why):
        zarr.parse_array_metadata(metadata(shape, chunks), zarr3=False)


def test_the_largest_arrays() -> None:
    """One byte less is possible, and 32 axes."""
    assert zarr.parse_array_metadata(metadata([2**59 - 1], [1]), zarr3=False).nbytes == 2**62 - 8
    assert zarr.parse_array_metadata(metadata([1] * 32, [1] * 32), zarr3=False).shape == (1,) * 32


def test_boxes_that_are_chunks() -> None:
    """Only with the chunk's own start and length."""
    info = zarr.parse_array_metadata(metadata([8, 6], [4, 3]), zarr3=False)
    assert info.cell_of((slice(4, 8), slice(0, 3))) == (1, 0)
    for box in ((slice(4, 8), slice(0, 2)), (slice(4, 8), slice(1, 4)), (slice(0, 8), slice(0, 3))):
        assert info.cell_of(box) is None


def test_how_large_arrays_are_split() -> None:
    """Plain ones from 2 GiB on; chunks of a shard divide it evenly, unless only far smaller ones would."""
    gib = 2**30
    assert zarr.chunk_shape((2 * gib,), (2 * gib,), 1, splits=False) == [2 * gib]
    assert zarr.chunk_shape((4 * gib,), (4 * gib,), 1, splits=False) == [2 * gib]
    assert zarr.chunk_shape((6, gib), (6, gib), 1, splits=False) == [2, gib]
    assert zarr.chunk_shape((18, gib), (9, gib), 1, splits=False) == [1, gib]
    assert zarr.chunk_shape((202, 3 * gib // 101), (101, 3 * gib // 101), 1, splits=False)[0] == 101


@pytest.mark.parametrize("compression", [None, "crc32c", "zstd"])
@pytest.mark.parametrize("dtype", sorted(name for name in zarr._V3_NAMES if hasattr(ts, name)))  # old ones lack some
def test_it_is_what_tensorstore_writes(dtype: str, compression: str | None) -> None:
    """Members and values are those of the file that TensorStore makes of them; any release of it reads that."""
    encoding, metadata = writer._ENCODINGS[compression], {"shape": [6, 8], "dtype": zarr.dtype_from_name(dtype)}
    ours = zarr.dump_metadata((6, 8), (3, 8), np.dtype(metadata["dtype"]), encoding)
    context = ts.Context()
    spec = {"driver": "zarr3" if encoding.checksums else "zarr", "kvstore": "memory://", "metadata": ours}
    ts.open(spec, create=True, context=context).result()
    theirs = json.loads(ts.KvStore.open("memory://", context=context).result()[encoding.metadata_file])
    assert theirs == ours
