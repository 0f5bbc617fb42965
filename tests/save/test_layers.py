"""Checkpoints in a lower layer of overlayfs, as of a container's image: directories there cannot be renamed (EXDEV)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.local import atomic, removal

TREE = {"w": np.arange(20_000.0), "n": 1}


@pytest.fixture(autouse=True)
def lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1, in Orbax's format, is of the lower layer: measured, both calls fail on overlayfs of Linux 6.18."""
    flax_ckpt_compat.save(tmp_path / "checkpoint_1", TREE, format="orbax")
    rename, exchange, path = os.rename, atomic._exchange, str(tmp_path / "checkpoint_1")

    def refuse(source: str, target: str) -> None:
        if source == path:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: other != path and exchange(one, other))


def test_it_is_evicted(flag: bool, tmp_path: Path) -> None:
    """Nothing of it is left."""
    checkpoints.save_checkpoint(tmp_path, TREE, 2)
    assert os.listdir(tmp_path) == ["checkpoint_2"]


def test_it_does_not_count_once_its_removal_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is killed in between leaves a part, which no look-up takes for a checkpoint."""
    delete, left = removal.delete, []

    def interrupted(path: str) -> None:
        if left:
            raise KeyboardInterrupt
        left.append(path)
        delete(path)

    with monkeypatch.context() as patch:
        patch.setattr(removal, "delete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save_checkpoint(tmp_path, TREE, 2)
    assert not os.path.lexists(left[0])
    assert len(os.listdir(tmp_path / "checkpoint_1")) > 1
    assert checkpoints.available_steps(tmp_path) == [2]
    delete(str(tmp_path / "checkpoint_2"))
    assert checkpoints.latest_checkpoint(tmp_path) is None


def test_to_replace_it_is_an_error_that_says_why(flag: bool, tmp_path: Path) -> None:
    """It cannot be replaced at once, so it stays as it is."""
    with pytest.raises(errors.StorageError, match=r"overlayfs.*save to another directory"):
        checkpoints.save_checkpoint(tmp_path, TREE, 1, overwrite=True)
    assert checkpoints.restore_checkpoint(tmp_path, None, 1)["n"] == 1
    assert os.listdir(tmp_path) == ["checkpoint_1"]
