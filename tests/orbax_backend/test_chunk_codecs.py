"""Chunks as real Orbax stores them, whole and in parts, intact and damaged: what we decode is what TensorStore does."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from flax_ckpt_compat._core.backend import ArraySlice
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from tests.orbax_backend.conftest import WRITERS, pytree
from tests.support.orbax_trees import find, handles, load
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
        parts = [ArraySlice(handle, box) for box in BOXES]
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
    np.testing.assert_array_equal(handle.reader.read([ArraySlice(handle, np.s_[0:2, 0:4])])[0], values[:2, :4])


CODECS: dict[str, tuple[str, list[Any]]] = {
    "big-endian": ("ours", [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "zstd"}]),
    "big-endian, of bfloat16": ("driver", [{"name": "bytes", "configuration": {"endian": "big"}}]),
    "plain": ("ours", ["bytes"]),
    "index at the start": (
        "driver",
        [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [3, 5],
                    "codecs": ["bytes", {"name": "zstd"}],
                    "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                    "index_location": "start",
                },
            }
        ],
    ),
    "many chunks in a shard": (
        "driver",
        [{"name": "sharding_indexed", "configuration": {"chunk_shape": [1, 5], "codecs": ["bytes", {"name": "zstd"}]}}],
    ),
    "transposed": ("driver", [{"name": "transpose", "configuration": {"order": [1, 0]}}, "bytes", {"name": "zstd"}]),
    "gzip": ("driver", ["bytes", {"name": "gzip"}]),
    "blosc": ("driver", ["bytes", {"name": "blosc", "configuration": {"cname": "lz4"}}, {"name": "crc32c"}]),
}


@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("codec", CODECS)
def test_other_codecs_of_zarr_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, separator: str) -> None:
    """Orders of bytes and places of the index are decoded by us, everything else by TensorStore's driver."""
    who, codecs = CODECS[codec]
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
    np.testing.assert_array_equal(handle.reader.read([ArraySlice(handle, np.s_[2:7, 4:6])])[0], values[2:7, 4:6])
