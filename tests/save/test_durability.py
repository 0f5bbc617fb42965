"""What a save has synced to disk when its name counts, and in which order old checkpoints go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints

TREE = {"w": np.arange(200_000.0), "small": {"b": np.ones(3)}, "name": "text"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_all_is_synced_before_the_name_counts(
    flag: bool, overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file and directory of a checkpoint first, then, under its name, the directory that it lies in."""
    final, fsync = tmp_path / "run" / "checkpoint_1", os.fsync
    final.parent.mkdir()
    if overwrite:
        checkpoints.save_checkpoint(final.parent, {"old": 1}, 1)
    old = os.stat(final).st_ino if overwrite else None
    before, after = set(), set()

    def noting(descriptor: int) -> None:
        there = os.stat(final).st_ino if final.exists() else None
        (before if there == old else after).add(os.stat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    checkpoints.save_checkpoint(final.parent, TREE, 1, overwrite=overwrite)
    # TensorStore syncs what it writes itself (its setting file_io_sync), unseen from here.
    files = [final, *(one for one in final.rglob("*") if one.parent.name != "d" and one.name != "manifest.ocdbt")]
    assert len(files) >= (5 if flag else 1)
    assert [file for file in files if os.stat(file).st_ino not in before] == []
    assert os.stat(final.parent).st_ino in after


def test_the_oldest_goes_first(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever an eviction ends, no checkpoint is gone that is newer than one that stays."""
    for step in (2, 9, 10, 11):
        checkpoints.save_checkpoint(tmp_path, TREE, step, keep=9)
    seen = []

    def noting(real: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> None:
            seen.append([step for step in (2, 9, 10, 11) if (tmp_path / f"checkpoint_{step}").exists()])
            real(*arguments, **options)

        return noted

    for name in ("unlink", "rmdir", "rename", "replace"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    checkpoints.save_checkpoint(tmp_path, TREE, 12, keep=1)
    stages = [stage for number, stage in enumerate(seen) if stage not in seen[:number]]
    assert stages[0] == [2, 9, 10, 11]
    assert len(stages) > 2
    assert all(stage == [2, 9, 10, 11][4 - len(stage) :] for stage in stages), stages
    assert checkpoints.available_steps(tmp_path) == [12]
