"""Checksums of the arrays of several processes: recorded in attributes of their files, which other readers ignore."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from flax_ckpt_compat.legacy import BACKEND

from flax_ckpt_compat import config, errors, restore, verify
from flax_ckpt_compat._core.backend import ArraySlice
from flax_ckpt_compat._core.local import file_checksums
from flax_ckpt_compat._core.location import location_of
from tests.support.spread import OPTIONS, Spread, save

W = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
TREE = {"w": Spread(W), "v": Spread(np.arange(16)), "n": 1}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint whose arrays were written by two processes."""
    path = tmp_path / "checkpoint_1"
    save(path, TREE)
    files = [file for file in Path(f"{path}_gda").rglob("*") if file.is_file()]
    if file_checksums.holds(str(files[0])) is None:
        pytest.skip("no extended attributes here")
    return path


def flip(file: Path, at: int) -> None:
    """One bit changes as on a decaying disk: size and time stay."""
    status = os.stat(file)
    with open(file, "r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << at % 8]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_no_flip_is_silent(saved: Path) -> None:
    """In no byte of any file of the folder; `verify` finds each, and so does a restore."""
    expected, seen = restore(saved), 0
    for file in sorted(Path(f"{saved}_gda").rglob("*")):
        if not file.is_file():
            continue
        size = file.stat().st_size
        for at in {*range(0, size, max(1, size // 20)), size - 1}:
            flip(file, at)
            with pytest.raises(errors.CorruptCheckpointError):
                restore(saved)
            assert verify(saved).state == "damaged"
            flip(file, at)
            seen += 1
    assert seen > 80
    assert verify(saved).ok
    np.testing.assert_array_equal(restore(saved)["w"], expected["w"])
    np.testing.assert_array_equal(expected["w"], W)


def test_the_error_names_the_file_and_the_way_out(saved: Path) -> None:
    """The leaf, the file, and the setting that reads it as it is."""
    file = Path(f"{saved}_gda") / "v" / "0"
    flip(file, file.stat().st_size - 1)
    with pytest.raises(errors.ChecksumError, match=f"v: {file} is not what was saved") as caught:
        restore(saved)
    assert caught.value.leaf == "v"
    with config.override(checksums="off"):
        try:
            restore(saved)
        except errors.ChecksumError:
            pytest.fail("it was not to look")
        except errors.CorruptCheckpointError:
            pass  # zstd found it


def test_tensorstore_reads_the_chunks(saved: Path) -> None:
    """The attributes are in nobody's way."""
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{saved}_gda/w/"}}
    np.testing.assert_array_equal(ts.open(spec, read=True).result().read().result(), W)


def test_a_copy_without_attributes_is_unverified(saved: Path, tmp_path: Path) -> None:
    """A plain copy loses them, so that nothing covers the bytes: `verify` does not say ok."""
    other = tmp_path / "other"
    other.mkdir()
    shutil.copyfile(saved, other / saved.name)
    shutil.copytree(f"{saved}_gda", other / f"{saved.name}_gda", copy_function=shutil.copyfile)
    found = verify(other)
    assert (found.state, found.ok, found.damaged) == ("unverified", False, False)
    assert "1 checkpoint: 0 ok, 1 unverified." in str(found)
    np.testing.assert_array_equal(restore(other / saved.name)["w"], W)


def test_one_chunk_without_checksums_is_not_ok(saved: Path) -> None:
    """All files of an array have to be covered."""
    chunk = Path(f"{saved}_gda") / "v" / "1"
    content = chunk.read_bytes()
    chunk.unlink()
    chunk.write_bytes(content)
    states = {leaf.path: leaf.state for leaf in verify(saved).checkpoints[0].leaves}
    assert (states["v"], states["w"]) == ("unverified", "ok")
    assert verify(saved).state == "unverified"


def test_without_the_setting_nothing_is_recorded(tmp_path: Path) -> None:
    """``checksums="off"`` is for the folder, too."""
    path = tmp_path / "checkpoint_1"
    save(path, TREE, dataclasses.replace(OPTIONS, checksums=False))
    assert file_checksums.holds(f"{path}_gda/v/0") is None
    assert verify(path).state == "unverified"


def test_a_slice_reads_only_its_chunks(saved: Path) -> None:
    """A damaged chunk is in nobody's way who reads another one."""
    flip(Path(f"{saved}_gda") / "w" / "1.0", 30)
    reader = BACKEND.open(location_of(saved), verify=True)
    leaf = reader.tree.children["w"]

    def rows(start: int, stop: int) -> ArraySlice:
        return ArraySlice(leaf, (slice(start, stop), slice(0, 8)))

    np.testing.assert_array_equal(reader.read([rows(0, 32)])[0], W[:32])
    with pytest.raises(errors.CorruptCheckpointError):
        reader.read([rows(31, 33)])
    reader.close()
