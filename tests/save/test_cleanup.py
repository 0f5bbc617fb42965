"""A committed save whose clean-up fails says that the step was saved, and loses no later one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.local import atomic
from tests.support.saves import names, tree, use_flag


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


def test_a_listing_refused_after_the_commit(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention that cannot list the directory fails in the same words."""
    publish = atomic.publish

    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    def then_refuse(*args: str, **options: bool) -> None:
        publish(*args, **options)
        monkeypatch.setattr(os, "listdir", refuse)

    monkeypatch.setattr(atomic, "publish", then_refuse)
    with pytest.raises(errors.CleanupError, match="checkpoint_1 was saved, but"):
        ours.save_checkpoint(tmp_path, tree(1), 1)


def test_in_the_background_it_is_logged_and_stops_no_later_save(
    flag: bool, tmp_path: Path, undeletable: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """An error raised at the next save would keep that one from being saved."""
    manager = ours.AsyncManager()
    ours.save_checkpoint(tmp_path, tree(1), 1, async_manager=manager)
    manager.wait_previous_save()
    undeletable.add("checkpoint_1")
    for step in (2, 3):
        ours.save_checkpoint(tmp_path, tree(step), step, async_manager=manager)
        manager.wait_previous_save()
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
    assert "checkpoint_1 was saved, but what it replaced cannot be removed" in caplog.text


def test_arrays_stay_with_a_checkpoint_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A msgpack file without the folder beside it would look complete, and not restore."""
    array, unlink = tmp_path / "checkpoint_1_gda" / "w" / ".zarray", os.unlink

    def refusing(path: Any, **options: Any) -> None:
        if Path(path) == tmp_path / "checkpoint_1":
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, **options)

    with use_flag(False):
        ours.save_checkpoint(tmp_path, tree(1), 1)
        array.parent.mkdir(parents=True)
        array.write_text("{}")
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refusing)
            with pytest.raises(errors.CleanupError, match="checkpoint_2 was saved, but"):
                ours.save_checkpoint(tmp_path, tree(2), 2)
        assert array.exists()
        ours.save_checkpoint(tmp_path, tree(3), 3)
    assert names(tmp_path) == ["checkpoint_3"]
