"""Arrays of several processes, in the zarr folder beside the msgpack file: damage, and what checksums find."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import msgpack
import numpy as np
import pytest
import tensorstore as ts
import zstandard
from flax_ckpt_compat.legacy import BACKEND

from flax_ckpt_compat import config, errors, restore, verify
from flax_ckpt_compat._core.backend import LeafHandle
from flax_ckpt_compat._core.dtypes import dtype_from_name
from flax_ckpt_compat._core.errors import CorruptCheckpointError
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.tree import iter_leaves
from tests.support.disks import flip
from tests.support.spread import OPTIONS, Spread, load, save
from tests.support.trees import fill

_DATA = Path(__file__).parents[1] / "data" / "gda"
_LEAF, _TREE = ("two_processes_leaf", "checkpoint_7"), ("two_processes_tree", "checkpoint_3")


def _copy(case, tmp_path):
    folder, name = case
    shutil.copytree(_DATA / folder, tmp_path / "gda")
    return tmp_path / "gda" / name


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.rename(path.with_name("9.9")),  # as many files as chunks
        # A frame of zstd that says that it holds a TiB, which nobody should ask for.
        lambda path: path.write_bytes(bytes.fromhex("28b52ffde0") + (2**40).to_bytes(8, "little") + b"\1\0\0"),
    ],
)
def test_damaged_chunk(damage, tmp_path):
    """A missing or cut chunk is an error, never zeros, and other arrays can still be read."""
    path = _copy(_TREE, tmp_path)
    damage(Path(f"{path}_gda/params/xy/1.0"))
    params = BACKEND.open(location_of(path)).tree.children["params"].children
    with pytest.raises(CorruptCheckpointError, match="params/xy") as caught:
        params["xy"].read()
    assert caught.value.__cause__ is not None
    assert params["y_i32"].read().tolist() == list(range(8))


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[]", b"{}", b"[" * 5000, b'{"shape": [-1], "dtype": "<f4"}', b'{"shape": [], "dtype": 3}'),
        b'{"shape": [1099511627776], "chunks": [1099511627776], "dtype": "<f4", "compressor": {"id": "zstd"}}',
    ],
)
def test_damaged_metadata(text, tmp_path):
    """Metadata that does not decode is an error that names the file."""
    path = _copy(_LEAF, tmp_path)
    Path(f"{path}_gda/.zarray").write_bytes(text)
    with pytest.raises(CorruptCheckpointError, match=r"\.zarray|4398046511104 bytes, are needed"):
        BACKEND.open(location_of(path)).tree.read()


@pytest.mark.parametrize("subpath", ["../x", "a/../../x", "/etc", "a\0b", ".."])
def test_escaping_reference(subpath, tmp_path):
    """A reference that leads out of the folder is refused, whether or not something is there."""
    path = tmp_path / "checkpoint_1"
    path.write_bytes(msgpack.packb({"a": f"//GDAPlaceholder:{subpath}"}))
    shutil.copytree(_DATA / _LEAF[0] / f"{_LEAF[1]}_gda", tmp_path / "x")
    (tmp_path / "checkpoint_1_gda").mkdir()
    with pytest.raises(CorruptCheckpointError, match="leads out"):
        BACKEND.open(location_of(path))


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_an_array_that_is_replaced_after_the_file_was_opened(change, tmp_path):
    """What was announced is what comes back: another dtype or shape in the folder is an error, not a conversion."""
    path = _copy(_TREE, tmp_path)
    reader = BACKEND.open(location_of(path))
    handle = next(leaf for _, leaf in iter_leaves(reader.tree) if leaf.in_gda_folder and leaf.dtype == np.float32)
    file = Path(handle.locator.folder.path, ".zarray")
    fields = json.loads(file.read_text())
    fields[change] = "<f8" if change == "dtype" else [length + 1 for length in fields["shape"]]
    file.write_text(json.dumps(fields))
    with pytest.raises(CorruptCheckpointError, match=r"it is now .*, it was float32"):
        reader.read([handle])


W = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
UNUSED = (4, 4)  # byte and bit of a Zstandard frame to which decoders give no meaning (RFC 8878, 3.1.1.1.1.3)
DTYPES = [*"?bhiqBHIQefdFD", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4"]
TREE = {"w": Spread(W), "v": Spread(np.arange(16)), "n": 1}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint whose arrays were written by two processes."""
    path = tmp_path / "checkpoint_1"
    save(path, TREE)
    return path


@pytest.mark.slow
def test_no_flip_is_silent(saved: Path) -> None:
    """In no byte of any file of the folder; `verify` finds each, and so does a restore."""
    expected, seen = restore(saved), 0
    for file in sorted(Path(f"{saved}_gda").rglob("*")):
        if not file.is_file():
            continue
        size = file.stat().st_size
        for at in {*range(0, size, max(1, size // 20)), size - 1}:
            flip(file, at, at % 8)
            if file.name != ".zarray" and (at, at % 8) == UNUSED:
                np.testing.assert_array_equal(restore(saved)["w"], expected["w"])
            else:
                with pytest.raises(errors.CorruptCheckpointError):
                    restore(saved)
                assert verify(saved).state == "damaged"
            flip(file, at, at % 8)
            seen += 1
    assert seen > 80
    assert verify(saved).ok
    np.testing.assert_array_equal(restore(saved)["w"], expected["w"])
    np.testing.assert_array_equal(expected["w"], W)


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("name", DTYPES)
def test_chunks_are_those_of_tensorstore(name: str, sums: bool, tmp_path: Path) -> None:
    """The content that its driver of zarr v2 writes, of all bits, of zeros, and of nothing; each of us reads it."""
    dtype = np.dtype(name) if len(name) == 1 else dtype_from_name(name)
    arrays = {"w": fill((6, 5), dtype, 1), "z": np.zeros((2, 5), dtype), "e": np.zeros((0, 3), dtype)}
    options = dataclasses.replace(OPTIONS, checksums=sums)
    save(tmp_path / "c", {one: Spread(array) for one, array in arrays.items()}, options)
    for one, whole in arrays.items():
        ours, theirs = tmp_path / "c_gda" / one, tmp_path / one
        metadata = json.loads((ours / ".zarray").read_text())
        assert (metadata.pop("flax_ckpt_compat", None) is not None) == sums
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(theirs)}, "metadata": metadata}
        ts.open(spec, create=True, open=True).result().write(whole).result()
        chunks = [".zarray", "0.0", "1.0"][: 1 + 2 * bool(whole.size)]
        assert sorted(os.listdir(ours)) == sorted(os.listdir(theirs)) == chunks
        for chunk in chunks[1:]:
            mine, expected = (ours / chunk).read_bytes(), (theirs / chunk).read_bytes()
            assert bool(mine[4] & 4) == sums
            contents = [zstandard.ZstdDecompressor().decompressobj().decompress(one) for one in (mine, expected)]
            rows = len(whole) // 2
            assert contents[0] == contents[1] == whole[rows * int(chunk[0]) :][:rows].tobytes()
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{ours}/"}}
        for found in (ts.open(spec, read=True).result().read().result(), load(tmp_path / "c")[(one,)]):
            assert (found.dtype, found.shape, found.tobytes()) == (whole.dtype, whole.shape, whole.tobytes())


def test_a_plain_copy_is_verified(saved: Path, tmp_path: Path) -> None:
    """The checksums are in the files; only those of the msgpack file are in an attribute, which it loses."""
    other = tmp_path / "other"
    other.mkdir()
    shutil.copyfile(saved, other / saved.name)
    shutil.copytree(f"{saved}_gda", other / f"{saved.name}_gda", copy_function=shutil.copyfile)
    assert {leaf.path: leaf.state for leaf in verify(other).checkpoints[0].leaves} == {
        "n": "unverified",
        "v": "ok",
        "w": "ok",
    }
    flip(other / f"{saved.name}_gda" / "w" / "1.0", 30)
    states = {leaf.path: leaf.state for leaf in verify(other).checkpoints[0].leaves}
    assert (states["v"], states["w"]) == ("ok", "damaged")
    with pytest.raises(errors.CorruptCheckpointError):
        restore(other / saved.name)


def test_the_error_names_the_leaf_and_the_file(saved: Path) -> None:
    """Of a chunk with another content, and of metadata, by which it would be numbers of another type."""
    chunk, metadata = (Path(f"{saved}_gda", *names) for names in (("v", "0"), ("w", ".zarray")))
    flip(chunk, chunk.stat().st_size - 1)
    said = (
        ("v", f"v: a chunk in {chunk.parent} is not what was saved"),
        ("w", f"w: {metadata} is not .*older step.*checksums='off'"),
    )
    for leaf, text in said:
        with pytest.raises(errors.ChecksumError, match=text) as caught:
            restore(saved)
        assert (caught.value.leaf, verify(saved).state) == (leaf, "damaged")
        if leaf == "v":
            flip(chunk, chunk.stat().st_size - 1)
            metadata.write_text(metadata.read_text().replace("<f4", "<i4"))
    with config.override(checksums="off"):
        np.testing.assert_array_equal(restore(saved)["w"], W.view(np.int32))


def test_a_slice_reads_only_its_chunks(saved: Path) -> None:
    """A damaged chunk is in nobody's way who reads another one."""
    flip(Path(f"{saved}_gda") / "w" / "1.0", 30)
    reader = BACKEND.open(location_of(saved), verify=True)
    leaf = reader.tree.children["w"]

    def rows(start: int, stop: int) -> LeafHandle:
        return leaf.part((slice(start, stop), slice(0, 8)))

    np.testing.assert_array_equal(reader.read([rows(0, 32)])[0], W[:32])
    with pytest.raises(errors.CorruptCheckpointError):
        reader.read([rows(31, 33)])
    reader.close()
