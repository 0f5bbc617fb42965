"""Another program removes a checkpoint, or its parts, while it is saved: no save is acknowledged that is not whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flax_ckpt_compat import checkpoints, errors, restore
from flax_ckpt_compat._discovery import saved_steps
from flax_ckpt_compat._save import pipeline, retention
from tests.support.saves import names, tree, use_flag


def save(folder: Path, step: int, **options: Any) -> None:
    """Saves a step as a program does."""
    checkpoints.save_checkpoint(folder, tree(step), step, **options)


@pytest.mark.parametrize("flag", [False, True])
def test_the_directory_is_removed_after_the_rename(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save that is not there any more is no success, and no older one is removed for it."""
    run, real = tmp_path / "run", pipeline.retain

    def retain(request: Any, *arguments: Any) -> None:
        shutil.rmtree(run / "checkpoint_2") if flag else (run / "checkpoint_2").unlink()
        real(request, *arguments)

    with use_flag(flag):
        save(run, 1)
        os.utime(run / "checkpoint_1", (0, 0))
        monkeypatch.setattr(pipeline, "retain", retain)
        with pytest.raises(errors.StorageError, match="no older checkpoint was removed"):
            save(run, 2, keep=1)
        assert restore(run / "checkpoint_1")["n"] == 1.0
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "retain", lambda *arguments: (shutil.rmtree(run), real(*arguments)))
            with pytest.raises(errors.StorageError, match="is not there"):
                save(run, 3, keep=1)


@pytest.mark.parametrize("flag", [False, True])
def test_a_name_that_counts_no_step(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``checkpoint_best`` evicts nothing and is evicted by nothing, but has to be there, too."""
    real = pipeline.retain

    def retain(request: Any, *arguments: Any) -> None:
        shutil.rmtree(tmp_path / "checkpoint_best") if flag else (tmp_path / "checkpoint_best").unlink()
        real(request, *arguments)

    monkeypatch.setattr(pipeline, "retain", retain)
    with use_flag(flag), pytest.raises(errors.StorageError, match="is not there"):
        checkpoints.save_checkpoint(tmp_path, tree(), "best")


def test_evicted_by_a_writer_that_was_evicted_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of an older step with ``overwrite`` removes this one, and is removed by a third: nothing was lost."""
    real_retain, real_modified = pipeline.retain, retention._modified

    def retain(request: Any, *arguments: Any) -> None:
        (tmp_path / "checkpoint_3").rename(tmp_path / "checkpoint_2")
        real_retain(request, *arguments)

    def modified(path: str) -> float:
        if path.endswith("_2") and os.path.exists(path):
            os.rename(path, path.replace("_2", "_1"))
        return real_modified(path)

    monkeypatch.setattr(pipeline, "retain", retain)
    monkeypatch.setattr(retention, "_modified", modified)
    with use_flag(False):
        save(tmp_path, 3, overwrite=True)
    assert names(tmp_path) == ["checkpoint_1"]


def test_a_listing_that_misses_the_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that changes while it is listed may be listed without a name that is there all the time."""
    real, missed = saved_steps.names_in, list[str]()

    def names_in(checkpoint_dir: Any) -> list[str]:
        found = real(checkpoint_dir)
        if "checkpoint_2" in found and not missed:
            missed.append("checkpoint_2")
            found.remove("checkpoint_2")
        return found

    with use_flag(False):
        save(tmp_path, 1)
        os.utime(tmp_path / "checkpoint_1", (0, 0))
        monkeypatch.setattr(saved_steps, "names_in", names_in)
        save(tmp_path, 2, overwrite=True, keep=1)
    assert missed
    assert names(tmp_path) == ["checkpoint_2"]


def test_a_part_that_is_removed_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that began in the temporary goes on in the checkpoint; one that is newer has not evicted it."""
    real = pipeline.retain

    def retain(request: Any, *arguments: Any) -> None:
        (tmp_path / "checkpoint_2" / "_METADATA").unlink()
        (tmp_path / "checkpoint_2" / "manifest.ocdbt").unlink()
        (tmp_path / "checkpoint_2" / "_CHECKPOINT_METADATA").unlink()
        (tmp_path / "checkpoint_2" / "commit_success.txt").unlink()
        real(request, *arguments)

    with use_flag(True):
        save(tmp_path, 1)
        monkeypatch.setattr(pipeline, "retain", retain)
        with pytest.raises(errors.StorageError, match="no older checkpoint was removed"):
            save(tmp_path, 2, keep=1)
    assert restore(tmp_path / "checkpoint_1")["n"] == 1.0
