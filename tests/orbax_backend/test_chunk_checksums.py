"""Chunks with zarr's codec ``crc32c``: every reader of the format checks them, and ours without TensorStore."""

import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax.training import checkpoints as flax_checkpoints
from flax_ckpt_compat.orbax_backend import ocdbt_writer, zarr

from flax_ckpt_compat._core.backend import ArraySlice
from flax_ckpt_compat._core.dtypes import dtype_from_name
from flax_ckpt_compat._core.errors import ChecksumError
from tests.support.orbax_trees import handles, load, save
from tests.support.trees import ML_DTYPES, NUMPY_DTYPES, fill, fingerprint

LARGE = np.arange(300_900, dtype=np.float32).reshape(1003, 300)


def stored_metadata(path: str, name: str) -> dict[str, Any]:
    """The ``zarr.json`` of an array."""
    spec = {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}
    return json.loads(ts.KvStore.open(spec).result()["zarr.json"])


def flipped(path: str, array: np.ndarray[Any, Any]) -> None:
    """Flips one bit in the middle of an array's bytes, wherever they lie."""
    needle = array.tobytes()[len(array.tobytes()) // 2 :][:64]
    (file,) = (file for file in Path(path).rglob("*") if file.is_file() and needle in file.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(needle) + 5] ^= 4
    file.write_bytes(data)


def test_crc32c_is_zarrs_codec(tmp_path: Path) -> None:
    """Small and large arrays are zarr v3 with the checksum last; zstd comes before it, where it pays."""
    tree = {"small": np.arange(3.0), "large": LARGE}
    for compression, names in [("crc32c", ["bytes", "crc32c"]), ("zstd", ["bytes", "zstd", "crc32c"])]:
        path = save(tmp_path / compression, tree, compression)
        assert json.loads((Path(path) / "_METADATA").read_text())["use_zarr3"] is True
        assert [codec["name"] for codec in stored_metadata(path, "large")["codecs"]] == names
        assert [codec["name"] for codec in stored_metadata(path, "small")["codecs"]] == ["bytes", "crc32c"]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float32", "complex64", "bfloat16", "int4"])
def test_fill_values_are_those_of_tensorstore(dtype: str) -> None:
    """Version 3 of zarr requires one, of the array's dtype."""
    spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": {"shape": [2], "data_type": dtype}}
    expected = json.loads(ts.open(spec, create=True).result().kvstore["zarr.json"])["fill_value"]
    found = zarr.dump_metadata((2,), (2,), dtype_from_name(dtype), zarr.Encoding(checksums=True))["fill_value"]
    assert found == expected and isinstance(found, type(expected) | int)


def test_the_inline_value_ends_with_the_checksum(tmp_path: Path) -> None:
    """The test vector of RFC 3720: 32 bytes of ones have the CRC-32C 0x62a8ab43."""
    path = save(tmp_path / "c", {"a": np.full(32, 255, np.uint8)}, "crc32c")
    spec = {"driver": "ocdbt", "base": f"file://{path}/", "path": "a/"}
    assert ts.KvStore.open(spec).result()["c/0"] == b"\xff" * 32 + struct.pack("<I", 0x62A8AB43)


@pytest.mark.parametrize("compression", ["crc32c", "zstd"])
def test_every_dtype_is_read_by_us_and_by_real_orbax(tmp_path: Path, compression: str) -> None:
    """Every dtype that zarr v2 has has a name in v3 too, in either byte order; small, 0-d and empty."""
    dtypes = [d for d in NUMPY_DTYPES + ML_DTYPES if d.kind not in "mMUSO" and d.name not in ("uint4", "float128")]
    shapes = [(), (3,), (0, 4), (200, 300)]
    tree = {f"{d.name}{i}": fill(shape, d, i) for d in dtypes for i, shape in enumerate(shapes)}
    big = {"big": np.arange(3).astype(">f4"), "bigger": np.arange(9e4).astype(">i8")}
    path = save(tmp_path / "c", {**tree, **big}, compression)
    assert fingerprint(load(path)) == fingerprint({**tree, **big})
    native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in big.items()}
    assert fingerprint(ocp.PyTreeCheckpointer().restore(path)) == fingerprint({**tree, **native})


@pytest.mark.parametrize("compression", ["crc32c", "zstd"])
def test_real_flax_restores_it(tmp_path: Path, compression: str) -> None:
    """Through Flax's own function, from a directory of steps, with jax arrays."""
    tree = {"w": jnp.arange(40_000.0).reshape(200, 200), "b": jnp.ones(3, jnp.bfloat16), "n": 3}
    save(tmp_path / "checkpoint_1", tree, compression)
    found = flax_checkpoints.restore_checkpoint(tmp_path, tree, orbax_checkpointer=ocp.PyTreeCheckpointer())
    assert fingerprint(jax.device_get(found)) == fingerprint(jax.device_get(tree))


@pytest.mark.parametrize("shape", [(3,), (20, 20), (1000, 300)])
@pytest.mark.parametrize("compression", ["crc32c", "zstd"])
def test_a_flipped_bit_is_an_error_that_names_leaf_and_chunk(
    tmp_path: Path, shape: tuple[int, ...], compression: str
) -> None:
    """Inline in the database, small and large; TensorStore, which checks too, does not read it either."""
    array = fill(shape, np.dtype(np.float32), 1)
    path = save(tmp_path / "c", {"inner": {"w": array}}, compression)
    if shape == (3,):
        replace_inline(path, array)
    else:
        flipped(path, array)
    with pytest.raises(ChecksumError, match=r"'inner/w'.*inner\.w/c/0"):
        load(path)
    with pytest.raises(ValueError, match="Digest mismatch"):
        ocp.PyTreeCheckpointer().restore(path)


def replace_inline(path: str, array: np.ndarray[Any, Any]) -> None:
    """Flips a bit of an array inline in a node of the database, which has a checksum of its own."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/", "path": "inner.w/"}).result()
    value = bytearray(store["c/0"])
    value[5] ^= 4
    store["c/0"] = bytes(value)


def test_parts_are_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns of an array of several chunks, whose last is padded; a part next to damage is an error."""
    monkeypatch.setattr("flax_ckpt_compat.orbax_backend.zarr._SPLIT_CHUNK_BYTES", 512 << 10)
    monkeypatch.setattr(ocdbt_writer, "_metadata", ocdbt_writer._metadata.__wrapped__)
    path = save(tmp_path / "c", {"w": LARGE}, "crc32c")
    assert stored_metadata(path, "w")["chunk_grid"]["configuration"]["chunk_shape"] == [251, 300]
    (handle,) = handles(path).values()
    boxes = [(slice(0, 1003), slice(0, 300)), (slice(5, 700), slice(0, 300)), (slice(3, 1003), slice(17, 19))]
    for box in boxes:
        np.testing.assert_array_equal(handle.reader.read([ArraySlice(handle, box)])[0], LARGE[box])
    for box, found in zip(boxes, handle.reader.read([ArraySlice(handle, box) for box in boxes]), strict=True):
        np.testing.assert_array_equal(found, LARGE[box])
    np.testing.assert_array_equal(handle.reader.read([handle], mapped=True)[0], LARGE)
    flipped(path, LARGE)
    (handle,) = handles(path).values()
    with pytest.raises(ChecksumError, match=r"'w'.*chunk 'w/c/1/0'"):
        handle.reader.read([ArraySlice(handle, (slice(251, 253), slice(0, 2)))])
    np.testing.assert_array_equal(
        handle.reader.read([ArraySlice(handle, (slice(0, 251), slice(0, 300)))])[0], LARGE[:251]
    )
