"""A file system that returns fewer bytes than a file has is not damage of the checkpoint: a mount of an object store
does so while it uploads the file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat._core.local import storage
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat.errors import StorageError
from tests.support.saves import use_flag

_SYSFS = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # its size is a page, and it has a line

pytestmark = pytest.mark.skipif(not _SYSFS.is_file(), reason="needs a file of sysfs")


def test_a_file_of_sysfs_ends_early(tmp_path):
    """A real file whose size is more than what can be read."""
    assert len(_SYSFS.read_bytes()) < _SYSFS.stat().st_size
    with pytest.raises(OSError, match="its file system returned"):
        location_of(_SYSFS).read()
    (tmp_path / "checkpoint_1").symlink_to(_SYSFS)
    with pytest.raises(StorageError, match="checkpoint_1 could not be read: its file system returned"):
        checkpoints.restore_checkpoint(tmp_path, None)


@pytest.mark.parametrize("checksums", ["verify", "off"])
@pytest.mark.parametrize("orbax", [False, True], ids=["msgpack", "orbax format"])
def test_no_array_data_is_there_yet(tmp_path, monkeypatch, orbax, checksums):
    """Reads of array data return nothing, though the files have their sizes; later they return all of it."""
    tree = {"a": np.arange(3 << 20, dtype=np.float32), "b": np.ones(3)}
    with use_flag(orbax), config.override(checksums=checksums):
        checkpoints.save_checkpoint(tmp_path, tree, 1)
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(StorageError, match="could not be read: its file system returned"):
            checkpoints.restore_checkpoint(tmp_path, None)
        monkeypatch.setattr(os, "preadv", real)
        np.testing.assert_array_equal(checkpoints.restore_checkpoint(tmp_path, None)["a"], tree["a"])


@pytest.mark.parametrize("name", ["flax_ckpt_compat.checksums", "_METADATA", "manifest.ocdbt"])
def test_no_byte_of_a_file_is_there_yet(tmp_path, monkeypatch, name):
    """A file beside the arrays has its size and returns nothing."""

    def read(self, path, start=0, stop=None, listing=None):
        return real(self, str(_SYSFS) if path.endswith(name) else path, start, stop, listing)

    with use_flag(True):
        checkpoints.save_checkpoint(tmp_path, {"a": np.arange(1 << 10)}, 1)
        real = storage.LocalStorage.read
        monkeypatch.setattr(storage.LocalStorage, "read", read)
        with pytest.raises(StorageError, match="its file system returned"):
            checkpoints.restore_checkpoint(tmp_path, None)
