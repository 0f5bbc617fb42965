"""A committed save whose clean-up fails says that the step was saved, and loses no later one."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, errors, restore
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat._core import progress
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._discovery import saved_steps
from flax_ckpt_compat._save import pipeline
from tests.support.saves import names, refuse, save_by, tree, use_flag


@pytest.fixture
def undeletable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names whose removal the system refuses, as it does below directories of other users."""
    refused: set[str] = set()
    unlink, rename, rmtree = os.unlink, os.rename, shutil.rmtree

    def check(path: Any) -> None:
        if any(name in str(path) for name in refused):
            raise PermissionError(13, "Permission denied", str(path))

    def refusing(function: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            check(path)
            return function(path, *args, **kwargs)

        return call

    monkeypatch.setattr(os, "unlink", refusing(unlink))
    monkeypatch.setattr(os, "rename", refusing(rename))
    monkeypatch.setattr(shutil, "rmtree", refusing(rmtree))
    return refused


def test_the_error_says_that_the_step_was_saved(flag: bool, tmp_path: Path, undeletable: set[str]) -> None:
    """It names the new checkpoint first, then what stays; the other old checkpoints are removed all the same."""
    for step in (1, 2):
        ours.save_checkpoint(tmp_path, tree(step), step, keep=0)
    undeletable.add("checkpoint_1")
    with pytest.raises(errors.CleanupError) as caught:
        ours.save_checkpoint(tmp_path, tree(3), 3)
    assert str(caught.value).startswith(f"{tmp_path}/checkpoint_3 was saved, but ")
    assert f"{tmp_path}/checkpoint_1: Permission denied" in str(caught.value)
    assert isinstance(caught.value, OSError) and caught.value.errno == 13
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_3"]
    assert ours.restore_checkpoint(tmp_path, None)["n"] == 3
    undeletable.clear()
    ours.save_checkpoint(tmp_path, tree(4), 4)
    assert names(tmp_path) == ["checkpoint_4"]


def test_in_the_background_it_is_logged_and_stops_no_later_save(
    flag: bool, tmp_path: Path, undeletable: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """An error raised at the next save would keep that one from being saved."""
    manager = ours.AsyncManager()
    save_by(manager, tmp_path, tree(1), 1)
    undeletable.add("checkpoint_1")
    for step in (2, 3):
        save_by(manager, tmp_path, tree(step), step)
        assert caplog.text.count(f"checkpoint_{step} was saved, but") == 1
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_3"]


def test_a_replaced_checkpoint_that_cannot_be_removed(
    flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What overwriting set aside may stay; the save is complete, and a warning names what is left."""
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "checkpoint_1" / "_METADATA").write_text("{}")

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "delete", refuse)
        ours.save_checkpoint(tmp_path, tree(1), 1, overwrite=True)
    assert ours.restore_checkpoint(tmp_path, None)["n"] == 1
    assert "which was replaced" in caplog.text


def test_arrays_stay_with_a_checkpoint_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A msgpack file without the folder beside it would look complete, and not restore."""
    array = tmp_path / "checkpoint_1_gda" / "w" / ".zarray"
    with use_flag(False):
        ours.save_checkpoint(tmp_path, tree(1), 1)
        array.parent.mkdir(parents=True)
        array.write_text("{}")
        with monkeypatch.context() as patch:
            refuse(patch, "unlink", "checkpoint_1")
            with pytest.raises(errors.CleanupError, match="checkpoint_2 was saved, but"):
                ours.save_checkpoint(tmp_path, tree(2), 2)
        assert array.exists()
        ours.save_checkpoint(tmp_path, tree(3), 3)
    assert names(tmp_path) == ["checkpoint_3"]


def test_another_program_removes_an_old_checkpoint_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real Flax deletes files of a directory one by one; the save, which has committed, is not a failure."""
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "checkpoint_1" / "manifest.ocdbt").touch()
    (tmp_path / "checkpoint_1" / "ocdbt.process_0").mkdir()
    listdir, listed = os.listdir, list[Any]()

    def removed(path: Any = ".") -> list[str]:
        if str(path) == str(tmp_path / "checkpoint_1"):
            listed.append(path)
            if len(listed) == 1:
                return ["ocdbt.process_0", "d"]  # the manifest is gone already
            shutil.rmtree(path, ignore_errors=True)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", removed)
    ours.save_checkpoint(tmp_path, tree(1), 2)
    assert len(listed) == 2
    assert names(tmp_path) == ["checkpoint_2"]


def test_a_directory_that_cannot_be_listed_is_an_error_of_ours(
    flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is replaced, a save looks at it."""
    flax_ckpt_compat.save(tmp_path / "checkpoint_1", tree(1), format="orbax")
    with monkeypatch.context() as patch:
        refuse(patch, "listdir", "checkpoint_1", errno.EIO)
        with pytest.raises(errors.StorageError, match="Input/output error"):
            ours.save_checkpoint(tmp_path, tree(1), 1, overwrite=True)
    assert os.listdir(tmp_path) == ["checkpoint_1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_in_a_shared_directory_another_users_step_stays_whole(tmp_path: Path) -> None:
    """Its folder could be renamed, and not emptied: it would take space under a hidden name."""
    top = Path(tempfile.mkdtemp())  # which others may search, as ``tmp_path`` they may not
    run = top / "run"
    try:
        flax_ckpt_compat.save(run, tree(1), step=1, format="orbax")
        for folder in (top, run):
            folder.chmod(0o777)
        os.seteuid(65534)
        try:
            with pytest.raises(errors.CleanupError, match="Permission denied"):
                flax_ckpt_compat.save(run, tree(2), step=2, format="orbax", keep=1)
            assert ours.available_steps(run) == [1, 2]
            assert flax_ckpt_compat.restore(run, step=1)["n"] == 1
        finally:
            os.seteuid(0)
        assert sorted(path.name for path in run.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    finally:
        shutil.rmtree(top)


def test_a_manager_that_removes_unfinished_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real Orbax takes a save in progress for one of its own that was interrupted; the error says so."""
    made = list[Any]()

    def make(_: Any) -> None:
        if not made:
            options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True, enable_background_delete=False)
            made.append(ocp.CheckpointManager(tmp_path, options=options))
            end = time.monotonic() + 20  # a thread of its own removes them
            while is_removed and any(tmp_path.iterdir()) and time.monotonic() < end:
                time.sleep(0.01)

    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.0)
    is_removed = tuple(map(int, metadata.version("orbax-checkpoint").split(".")[:2])) >= (0, 12)  # 0.10.3 leaves it
    refused: Any = pytest.raises(errors.StorageError, match="cleanup_tmp_dir") if is_removed else nullcontext()
    with use_flag(True), config.override(progress=make), refused:
        ours.save_checkpoint(tmp_path, {"a": np.ones(3_000_000)}, 1)
    assert made and ours.available_steps(tmp_path) == ([] if is_removed else [1])


# Another program removes a checkpoint, or its parts, while it is saved: no save is acknowledged that is not whole


def save(folder: Path, step: Any, **options: Any) -> None:
    """Saves a step as a program does."""
    checkpoints.save_checkpoint(folder, tree(0 if step == "best" else step), step, **options)


def _lose_parts(path: Path) -> None:
    for part in ("_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA", "commit_success.txt"):
        (path / part).unlink()


REMOVALS: dict[str, tuple[bool, Any, Any, str]] = {  # flag, step, what another program removes, and what is told
    "the file": (False, 2, Path.unlink, "no older checkpoint was removed"),
    "the directory": (True, 2, shutil.rmtree, "no older checkpoint was removed"),
    "its parts": (True, 2, _lose_parts, "no older checkpoint was removed"),
    "all": (False, 2, lambda path: shutil.rmtree(path.parent), "is not there"),
    "a name without a number": (True, "best", shutil.rmtree, "is not there"),
}


@pytest.mark.parametrize("kind", REMOVALS)
def test_the_checkpoint_is_removed_after_the_rename(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save that is not there any more is no success, and no older one is removed for it."""
    flag, step, remove, told = REMOVALS[kind]
    run, real = tmp_path / "run", pipeline.retain

    def retain(*arguments: Any) -> None:
        remove(run / f"checkpoint_{step}")
        real(*arguments)

    with use_flag(flag):
        save(run, 1)
        os.utime(run / "checkpoint_1", (0, 0))  # so that it cannot be what has evicted the new one
        monkeypatch.setattr(pipeline, "retain", retain)
        with pytest.raises(errors.StorageError, match=told):
            save(run, step, keep=1)
    assert kind == "all" or restore(run / "checkpoint_1")["n"] == 1.0


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
