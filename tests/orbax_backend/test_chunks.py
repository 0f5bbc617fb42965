"""Chunks as real Orbax stores them, whole and in parts: TensorStore's values, in any boxes that numpy slices."""

import json
import math
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import zstandard
from flax_ckpt_compat.orbax_backend import ocdbt_writer, read_arrays, zarr
from flax_ckpt_compat.orbax_backend import read_plan as planning
from flax_ckpt_compat.orbax_backend.zarr import Encoding, chunk_shape
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flax_ckpt_compat._core import memory
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.local import local_file
from flax_ckpt_compat._core.tree import Shard
from tests.orbax_backend.conftest import WRITERS, pytree
from tests.support.orbax_trees import find, handles, load, save
from tests.support.profiles import examples
from tests.support.saves import around
from tests.support.trees import fill, fingerprint

DTYPES = ["bool", "int8", "uint16", "int32", "float64", "complex64", "bfloat16", "float8_e4m3fn", "int4"]
SHAPE = (30, 40)
BOXES = [np.s_[0:30, 0:40], np.s_[3:17, 5:6], np.s_[14:16, 0:40], np.s_[29:30, 39:40], np.s_[4:4, 0:40]]


LAYOUTS = {
    "v0": WRITERS["v0"],
    "v0 cut": pytree(cut=True),
    "v0 plain": pytree(cut=True, use_compression=False),
    "v0 files": pytree(cut=True, use_ocdbt=False),
    "whole files": WRITERS["files"],
    "zarr3 cut": pytree(cut=True, use_zarr3=True),
    "zarr3 files": pytree(cut=True, use_zarr3=True, use_ocdbt=False),
    "v1": WRITERS["v1"],
}


def _arrays() -> dict[str, Any]:
    return {name: jnp.asarray(fill(SHAPE, jnp.dtype(name), at)) for at, name in enumerate(DTYPES)}


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TensorStore opens no array."""
    with monkeypatch.context() as patch:
        patch.setattr("flax_ckpt_compat.orbax_backend.zarr.ArrayInfo._by_tensorstore", None)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_and_parts_of_them(tmp_path: Path, layout: str, no_driver: None) -> None:
    """Every dtype in every layout; parts are read alone and together, and share chunks."""
    tree = _arrays()
    path = LAYOUTS[layout](tmp_path / "c", tree)
    expected = {name: np.asarray(value) for name, value in tree.items()}
    assert fingerprint(load(path)) == fingerprint(expected)
    for name, handle in handles(path).items():
        parts = [handle.part(box) for box in BOXES]
        sliced = [expected[name][box] for box in BOXES]
        assert fingerprint(handle.reader.read(parts)) == fingerprint(sliced)
        assert fingerprint([handle.reader.read([part])[0] for part in parts]) == fingerprint(sliced)


def _store(path: Path, name: str) -> dict[str, Any]:
    """TensorStore's spec of an array."""
    files = {"driver": "file", "path": f"{path}/"}
    is_database = (path / "manifest.ocdbt").exists()
    kvstore = {"driver": "ocdbt", "base": files, "path": f"{name}/"} if is_database else f"file://{path}/{name}/"
    keys = ts.KvStore.open(kvstore).result().list().result()
    return {"driver": "zarr3" if b"zarr.json" in keys else "zarr", "kvstore": kvstore}


def _read_by_tensorstore(path: Path, name: str) -> Any:
    """The array, or None if TensorStore does not decode it."""
    spec = {**_store(path, name), "fill_missing_data_reads": False}
    try:
        return ts.open(spec, open=True).result().read().result()
    except ValueError:
        return None


def _read_by_us(path: Path, name: str) -> Any:
    try:
        (handle,) = (one for one in handles(path).values() if one.name == name)
        return handle.reader.read([handle])[0]
    except CorruptCheckpointError as error:
        assert f"'{name}'" in str(error)
        return None


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flipped_bits(tmp_path: Path, layout: str, no_driver: None) -> None:
    """Flips anywhere in a chunk's file are errors that name the leaf exactly where TensorStore finds them.

    Where a zstd frame has no checksum, both decode some flips to other values, and to the same."""
    values = np.random.default_rng(0).integers(0, 900, (70, 100)).astype(np.float32)
    path = LAYOUTS[layout](tmp_path / "c", {"w": values})
    keyed = ts.KvStore.open(_store(path, "w")["kvstore"]).result()
    chunk = next(keyed[key] for key in sorted(keyed.list().result()) if key[:2] not in (b".z", b"za"))
    file, start = find(path, chunk)
    data, outcomes = file.read_bytes(), set()
    for at in {*range(40), *range(0, len(chunk), 41 * (1 + len(chunk) // 9000)), *range(len(chunk) - 24, len(chunk))}:
        changed = bytearray(data)
        changed[start + at] ^= 1 << at % 8
        file.write_bytes(changed)
        ours, theirs = _read_by_us(path, "w"), _read_by_tensorstore(path, "w")
        assert (ours is None) == (theirs is None), at
        outcomes.add(ours is None)
        if ours is not None:
            np.testing.assert_array_equal(ours, theirs)
    assert outcomes <= {False} if layout == "v0 plain" else True in outcomes


def _chunk_files(path: Path) -> list[Path]:
    return [file for file in (path / "w").rglob("*") if file.is_file() and not file.name.startswith((".", "zarr"))]


@pytest.mark.parametrize("layout", ["v0 files", "zarr3 files"])
@pytest.mark.parametrize("left", [None, 0, 1, 60, -1, "more"])
def test_cut_and_missing_chunks(tmp_path: Path, layout: str, left: Any, no_driver: None) -> None:
    """A chunk's file that is missing, ends early or late is an error that names the leaf; parts without it are read."""
    values = np.random.default_rng(0).random((30, 40))
    path = LAYOUTS[layout](tmp_path / "c", {"w": values})
    file = max(_chunk_files(path), key=lambda file: list(map(int, re.findall(r"\d+", str(file.relative_to(path))))))
    data = file.read_bytes()
    file.unlink() if left is None else file.write_bytes(data + b"more" if left == "more" else data[:left])
    assert _read_by_us(path, "w") is _read_by_tensorstore(path, "w") is None
    handle = handles(path)["w"]
    np.testing.assert_array_equal(handle.reader.read([handle.part(np.s_[0:2, 0:4])])[0], values[:2, :4])


def test_a_chunk_that_decompresses_to_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frame does not tell the length, and what is decoded right into the array ends with the array."""
    monkeypatch.setattr(planning, "_IN_PLACE_BYTES", 1)
    path = LAYOUTS["whole files"](tmp_path / "c", {"w": np.zeros(SHAPE)})
    (file,) = _chunk_files(path)
    file.write_bytes(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(16 * math.prod(SHAPE))))
    assert _read_by_us(path, "w") is _read_by_tensorstore(path, "w") is None


def _sharded(chunk_shape: list[int], **options: Any) -> list[Any]:
    configuration = {"chunk_shape": chunk_shape, "codecs": ["bytes", {"name": "zstd"}], **options}
    return [{"name": "sharding_indexed", "configuration": configuration}]


LITTLE, BIG = ([{"name": "bytes", "configuration": {"endian": order}}] for order in ("little", "big"))
ZARR3_CODECS: dict[str, tuple[str, list[Any]]] = {
    "big-endian": ("ours", [*BIG, {"name": "zstd"}]),
    "big-endian, of bfloat16": ("driver", BIG),
    "plain": ("ours", ["bytes"]),
    "index at the start": ("driver", _sharded([3, 5], index_codecs=LITTLE, index_location="start")),
    "many chunks in a shard": ("driver", _sharded([1, 5])),
    "transposed": ("driver", [{"name": "transpose", "configuration": {"order": [1, 0]}}, "bytes", {"name": "zstd"}]),
    "gzip": ("driver", ["bytes", {"name": "gzip"}]),
    "blosc": ("driver", ["bytes", {"name": "blosc", "configuration": {"cname": "lz4"}}, {"name": "crc32c"}]),
}


@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("codec", ZARR3_CODECS)
def test_other_codecs_of_zarr_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, separator: str) -> None:
    """Orders of bytes and places of the index are decoded by us, everything else by TensorStore's driver."""
    who, codecs = ZARR3_CODECS[codec]
    dtype, path = ("bfloat16" if "bfloat16" in codec else "float64"), tmp_path / "c"
    values = np.random.default_rng(0).random((7, 9)).astype(dtype)  # by the name that jax registers
    path.mkdir()
    metadata: dict[str, Any] = {"shape": [7, 9], "data_type": dtype, "codecs": codecs}
    metadata["chunk_key_encoding"] = {"name": "default", "configuration": {"separator": separator}}
    grid = {"name": "regular", "configuration": {"chunk_shape": [3, 5]}}
    spec = {"driver": "zarr3", "kvstore": f"file://{path}/w/", "metadata": {**metadata, "chunk_grid": grid}}
    ts.open(spec, create=True).result()[...] = values
    value = {"value_type": "jax.Array", "skip_deserialize": False}
    tree = {"('w',)": {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": value}}
    (path / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": True}))
    if who == "ours":
        monkeypatch.setattr("flax_ckpt_compat.orbax_backend.zarr.ArrayInfo._by_tensorstore", None)
    handle = handles(path)["w"]
    np.testing.assert_array_equal(handle.reader.read([handle])[0], values)
    np.testing.assert_array_equal(handle.reader.read([handle.part(np.s_[2:7, 4:6])])[0], values[2:7, 4:6])


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
    slices = [handle.part(box) for box in boxes]
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
        parts = [handle.part(box) for box in boxes]
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
    (part,) = handle.reader.read([handle.part((slice(1, 3), slice(2, 6)))])
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
    around(monkeypatch, local_file, "open_regular", lambda file: os.truncate(file, 1000))
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
