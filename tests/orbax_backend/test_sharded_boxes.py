"""Parts of arrays: any boxes of any chunk grid, with and without a codec, against numpy's own slicing."""

from __future__ import annotations

import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from flax_ckpt_compat.orbax_backend import ocdbt_writer, read_arrays, zarr
from flax_ckpt_compat.orbax_backend import read_plan as planning
from flax_ckpt_compat.orbax_backend.zarr import Encoding, chunk_shape
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import ArraySlice, LeafHandle
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.local import local_file
from flax_ckpt_compat._core.tree import Shard
from tests.support.orbax_trees import handles, save
from tests.support.profiles import examples

CODECS: dict[str, Any] = {"raw": None, "zstd": {"id": "zstd", "level": 1}}


def stored_by_tensorstore(
    path: Path, values: np.ndarray[Any, Any], chunks: list[int], codec: str, *, ocdbt: bool = False, fill: Any = None
) -> LeafHandle:
    """A checkpoint of one array, as TensorStore writes it with any chunk grid; chunks of ``fill`` may lack."""
    files = {"driver": "file", "path": f"{path}/{'' if ocdbt else 'a/'}"}
    described = {"chunks": chunks, "compressor": CODECS[codec], "dtype": values.dtype.str, "shape": values.shape}
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": files, "path": "a/"} if ocdbt else files,
        "metadata": {**described, "fill_value": fill},
        "store_data_equal_to_fill_value": True,
    }
    path.mkdir(parents=True)
    ts.open(spec, create=True).result()[...] = values.astype(values.dtype.newbyteorder("="))
    entry = {"key_metadata": [{"key": "a", "key_type": 2}], "value_metadata": {"value_type": "np.ndarray"}}
    entry["value_metadata"]["skip_deserialize"] = False  # type: ignore[call-overload]
    metadata: dict[str, Any] = {"tree_metadata": {"('a',)": entry}, "use_ocdbt": ocdbt, "use_zarr3": False}
    if fill is None:
        metadata["store_array_data_equal_to_fill_value"] = True
    (path / "_METADATA").write_text(json.dumps(metadata))
    return handles(path)["a"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[tuple[slice, ...]]]:
    """A shape, a chunk grid for it, and boxes in it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    chunks = [draw(st.integers(1, length + 1)) for length in shape]
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        sides = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
        boxes.append(tuple(slice(start, stop) for start, stop in sides))
    return shape, chunks, boxes


@given(
    case=cases(),
    codec=st.sampled_from(sorted(CODECS)),
    dtype=st.sampled_from(["<f4", ">i2", "|u1", "<c16"]),
    ocdbt=st.booleans(),
    piece=st.sampled_from([planning.PIECE_BYTES, 64]),
    known=st.sampled_from([planning._MAX_KNOWN, 1]),
)
@settings(max_examples=examples(250), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_boxes_are_what_numpy_slices(
    tmp_path_factory: pytest.TempPathFactory, case: Any, codec: str, dtype: str, ocdbt: bool, piece: int, known: int
) -> None:
    """Any boxes of any grid, read alone, and together with the whole, are what numpy slices, in memory of their own.

    The smallest chunks of a database are inline in its index; large ones are read in pieces, here of few bytes."""
    shape, chunks, boxes = case
    values = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    handle = stored_by_tensorstore(tmp_path_factory.mktemp("boxes") / "c", values, chunks, codec, ocdbt=ocdbt)
    slices = [ArraySlice(handle, box) for box in boxes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "PIECE_BYTES", piece)
        patch.setattr(read_arrays, "BLOCK_BYTES", piece)
        patch.setattr(planning, "_MAX_KNOWN", known)
        for one, box in zip(slices, boxes, strict=True):  # a part of an inline chunk is not the chunk
            assert np.array_equal(handle.reader.read([one])[0], values[box])
        whole, *found = handle.reader.read([handle, *slices])
    assert np.array_equal(whole, values)
    assert all(array.ctypes.data % memory.ALIGNMENT == 0 for array in (whole, *found) if array.size)
    for box, part in zip(boxes, found, strict=True):
        assert part.dtype == values.dtype
        assert part.flags.writeable
        assert part.flags.c_contiguous
        assert np.array_equal(part, values[box])
        part[...] = 0
    assert np.array_equal(whole, values)


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("fill", [None, 7])
def test_a_lost_chunk_matters_where_it_is_wanted(tmp_path: Path, codec: str, fill: int | None) -> None:
    """A box that a missing chunk touches is an error that names it; others still read.

    Releases before 0.10.3 left out chunks of only the fill value, which they are in every box."""
    values = np.arange(80.0).reshape(8, 10)
    values[2:4] = 7
    handle = stored_by_tensorstore(tmp_path / "c", values, [2, 10], codec, fill=fill)
    (tmp_path / "c" / "a" / "1.0").unlink()
    for boxes in ([np.s_[4:8, 0:10]], [np.s_[0:5, 0:10], np.s_[1:6, 0:4]]):
        parts = [ArraySlice(handle, box) for box in boxes]
        if fill is None and len(boxes) > 1:
            with pytest.raises(CorruptCheckpointError, match=r"1\.0.*missing"):
                handle.reader.read(parts)
            continue
        for box, part in zip(boxes, handle.reader.read(parts), strict=True):
            assert np.array_equal(part, values[box])


@pytest.mark.parametrize("dtype", ["datetime64[s]", "U5", "S1", "float8_e4m3", "longdouble"])
def test_boxes_of_dtypes_that_zarr_lacks(tmp_path: Path, dtype: str) -> None:
    """Arrays that are stored in another dtype, some with an axis more, have parts as well."""
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    values = np.arange(24).reshape(4, 6).astype(kind)
    handle = handles(save(tmp_path / "c", {"a": values}))["a"]
    (part,) = handle.reader.read([ArraySlice(handle, (slice(1, 3), slice(2, 6)))])
    assert part.dtype == kind
    assert np.array_equal(part, values[1:3, 2:6])


def test_the_kernel_may_give_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than was asked for: the next read begins behind that."""
    values, real = np.random.default_rng(1).random(50_000), os.preadv
    handle = stored_by_tensorstore(tmp_path / "c", values, [50_000], "raw")
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [memoryview(buffers[0])[:7001]], at))
    assert np.array_equal(handle.read(), values)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nothing was read into is not returned as values."""
    handle = stored_by_tensorstore(tmp_path / "c", np.arange(50_000.0), [50_000], "raw")
    real = local_file.open_regular

    def cut(file: str) -> int:
        os.truncate(file, 1000)
        return real(file)

    monkeypatch.setattr(local_file, "open_regular", cut)
    with pytest.raises(CorruptCheckpointError, match=r"'a'.*ends too early"):
        handle.read()


def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """Data files of many hosts, or chunks in files of their own, are not all open at once."""
    values = np.random.default_rng(1).random((400, 3))
    handle = stored_by_tensorstore(tmp_path / "c", values, [1, 3], "raw")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 200, hard))
    try:
        found = handle.read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert np.array_equal(found, values)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("shape", "part", "compressed", "expected"),
    [
        ((64 * MIB, 2), (16 * MIB, 2), False, [16 * MIB, 2]),
        ((64 * MIB, 2), (16 * MIB, 2), True, [MIB, 2]),
        ((7, 512 * MIB), (7, 512 * MIB), False, [1, 512 * MIB]),
        ((1500 * MIB,), (1500 * MIB,), False, [500 * MIB]),
        ((1501 * MIB + 1,), (1501 * MIB + 1,), False, [393_478_145]),
        ((64, 40 * MIB), (64, 10 * MIB), True, [1, 2 * MIB]),
        ((4 * 33_554_467,), (33_554_467,), True, [33_554_467]),
        ((8, 0), (8, 0), True, [8, 1]),
        ((), (), True, []),
    ],
    ids=str,
)
def test_chunks_by_hand(shape: tuple[int, ...], part: tuple[int, ...], compressed: bool, expected: list[int]) -> None:
    """Parts of at most 8 MiB, or 2 GiB without a codec, of four-byte elements, worked out by hand."""
    assert chunk_shape(shape, part, 4, Encoding(checksums=compressed).chunk_bytes) == expected


@given(
    part=st.lists(st.integers(1, 5000), min_size=1, max_size=4).map(tuple),
    split=st.lists(st.sampled_from([1, 2, 3, 8]), min_size=4, max_size=4),
    compressed=st.booleans(),
)
def test_no_chunk_reaches_over_two_shards(part: tuple[int, ...], split: list[int], compressed: bool) -> None:
    """On every axis along which an array is split, chunks divide the shard."""
    shape = tuple(length * times for length, times in zip(part, split, strict=False))
    chunks = chunk_shape(shape, part, 8, Encoding(checksums=compressed).chunk_bytes)
    assert all(0 < chunk <= length for chunk, length in zip(chunks, part, strict=True))
    for chunk, length, times in zip(chunks, part, split, strict=False):
        assert times == 1 or length % chunk == 0
    limit = 2**23 if compressed else 2**31
    if math.prod(part) * 8 <= limit:
        assert chunks == list(part)
    if split == [1, 1, 1, 1]:
        assert math.prod(chunks) * 8 <= limit


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 4), (3, 5), (2, 7), (1, 3)])
def test_a_shard_that_cuts_a_chunk_is_refused(start: int, stop: int) -> None:
    """What it lacks of the chunk would be stored as something else; shards that begin and end with chunks pass."""
    text = zarr.dump_metadata((8, 3), (2, 3), np.dtype(np.int16), Encoding())
    info = zarr.parse_array_metadata(json.dumps(text).encode(), zarr3=False)
    columns = slice(0, 3)
    with pytest.raises(ValueError, match="was expected to lie in one shard"):
        ocdbt_writer._cells_of(Shard((slice(start, stop), columns), np.zeros((stop - start, 3), np.int16)), info)
    whole = Shard((slice(2, 6), columns), np.zeros((4, 3), np.int16))
    assert ocdbt_writer._cells_of(whole, info) == [
        ("1.0", (slice(0, 2), columns)),
        ("2.0", (slice(2, 4), columns)),
    ]
