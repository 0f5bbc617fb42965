"""A file that the system refuses to open is a StorageError, and not damage: whoever believes in damage deletes it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import VerifiedCheckpoint, checkpoints, config, save, verify
from flax_ckpt_compat.errors import PermissionDeniedError
from tests.support.saves import use_flag

_NOBODY = 65534
_TREE = {"large": np.arange(3 << 16, dtype=np.float32), "small": np.ones(3)}


def _orbax(folder: Path, **options: bool) -> None:
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)).save(folder / "checkpoint_1", _TREE)


def _ours(folder: Path, compression: str | None) -> None:
    with config.override(compression=compression):
        save(folder / "checkpoint_1", _TREE, format="orbax")


def _flax_gda(folder: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    large = jax.make_array_from_callback((8,), sharding, lambda index: np.arange(8.0, dtype=np.float32)[index])
    with use_flag(False):
        flax_checkpoints.save_checkpoint_multiprocess(folder, {"large": large}, 1)


_WRITERS = {
    "ours": lambda folder: _ours(folder, None),
    "ours with crc32c": lambda folder: _ours(folder, "crc32c"),
    "ours with zstd": lambda folder: _ours(folder, "zstd"),
    "msgpack": lambda folder: save(folder / "checkpoint_1", _TREE, format="msgpack"),
    "Orbax": _orbax,
    "Orbax with zarr v3": lambda folder: _orbax(folder, use_zarr3=True),
    "Orbax without OCDBT": lambda folder: _orbax(folder, use_ocdbt=False),
    "Orbax without OCDBT, with zarr v3": lambda folder: _orbax(folder, use_ocdbt=False, use_zarr3=True),
    "Flax's _gda": _flax_gda,
}


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder that everybody may search, as ``tmp_path`` they may not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def _as_nobody(folder: Path) -> tuple[Exception | None, VerifiedCheckpoint | None]:
    """Restore and verify as a user without rights; return the restore's error, and the report."""
    user, error, report = os.geteuid(), None, None
    if user == 0:
        os.seteuid(_NOBODY)
    try:
        try:
            checkpoints.restore_checkpoint(folder, None)
        except Exception as raised:
            error = raised
        with suppress(PermissionDeniedError):
            (report,) = verify(folder / "checkpoint_1").checkpoints
        return error, report
    finally:
        os.seteuid(user)


@pytest.mark.slow
@pytest.mark.parametrize("writer", _WRITERS)
def test_no_file_is_damaged_that_cannot_be_opened(top, writer):
    """Each file and each directory of each layout, one at a time."""
    folder = top / "run"
    folder.mkdir()
    _WRITERS[writer](folder)
    for path in folder.rglob("*"):
        path.chmod(0o755)
    checkpoints.restore_checkpoint(folder, None)
    verify(folder / "checkpoint_1")  # loads all modules, where root alone may read them
    refused = 0
    for path in sorted(folder.rglob("*")):
        path.chmod(0)
        error, report = _as_nobody(folder)
        path.chmod(0o755)
        assert error is None or isinstance(error, PermissionDeniedError), (path, error)
        assert report is None or report.state in ("ok", "unverified", "unreadable"), (path, report)
        assert error is None or report is None or report.state == "unreadable", (path, report)
        refused += error is not None
    assert refused
