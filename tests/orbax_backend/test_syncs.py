"""What the writer of Orbax's format syncs before it returns."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.orbax_trees import save


def test_each_file_and_folder_is_synced_with_all_that_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power loss takes bytes, or names, of a checkpoint that the caller publishes next."""
    synced, fsync = dict[int, object](), os.fsync

    def noting(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced[status.st_ino] = sorted(os.listdir(descriptor)) if stat.S_ISDIR(status.st_mode) else status.st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "fdatasync", noting)
    path = Path(save(tmp_path / "c", {"a": np.ones(300_000), "b": jnp.ones(3), "text": "word"}))
    folders = [path, *(folder for folder in path.rglob("*") if folder.is_dir())]
    assert {folder.name for folder in folders} == {"c", "d", "array_metadatas"}
    assert {str(folder): synced.get(folder.stat().st_ino) for folder in folders} == {
        str(folder): sorted(os.listdir(folder)) for folder in folders
    }
    # TensorStore syncs the files that it writes itself (its setting file_io_sync), unseen from here.
    files = [file for file in path.iterdir() if file.is_file() and file.name != "manifest.ocdbt"]
    assert len(files) > 5
    assert {file.name: synced.get(file.stat().st_ino) for file in files} == {
        file.name: file.stat().st_size for file in files
    }
