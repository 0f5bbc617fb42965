"""Which checkpoint a path means: what dead writers set aside, and directories that were never finished."""

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core import files
from tests.support.saves import dead_pid, names, tree, use_flag


def set_aside(path: Path) -> None:
    """Renames a checkpoint to what a writer leaves that died before it put its own in the place."""
    old = Path(files.temporary_path(str(path), "old"))
    path.rename(old.with_name(old.name.replace(f"-{os.getpid()}-", f"-{dead_pid()}-")))


@pytest.mark.parametrize("how", ["directory", "step", "own path"])
def test_checkpoints_set_aside_by_dead_writers_restore(how: str, flag: bool, tmp_path: Path) -> None:
    """Whether the directory, the step or its own path is asked for, a checkpoint set aside is put back and restored."""
    path = Path(checkpoints.save_checkpoint(tmp_path, tree(1), 1))
    set_aside(path)
    assert names(tmp_path) != ["checkpoint_1"]
    where, step = {"directory": (tmp_path, None), "step": (tmp_path, 1), "own path": (path, None)}[how]
    np.testing.assert_array_equal(checkpoints.restore_checkpoint(where, None, step)["w"], tree(1)["w"])
    assert names(tmp_path) == ["checkpoint_1"]


@pytest.mark.parametrize("left", [["_CHECKPOINT_METADATA"], ["d", "_sharding"], []])
@pytest.mark.parametrize("item", ["default", "state"])
def test_half_written_directories_by_their_own_path(left: list[str], item: str, tmp_path: Path) -> None:
    """The directory of a checkpoint that Orbax began is an error by its own path, as it is by its step."""
    with use_flag(True):
        path = Path(checkpoints.save_checkpoint(tmp_path, tree(9), 9))
    for name in set(names(path)) - set(left):
        shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()
    (path / f"{item}.orbax-checkpoint-tmp").mkdir()
    for where, step in ((path, None), (tmp_path, 9)):
        with pytest.raises(errors.IncompleteCheckpointError, match=r"orbax-checkpoint-tmp"):
            checkpoints.restore_checkpoint(where, None, step)


@pytest.mark.parametrize(
    "entry", ["notes.txt", "checkpoint_3.orbax-checkpoint-tmp-17/x", "7.orbax-checkpoint-tmp/x", "images_2/a.png"]
)
def test_directories_of_something_else(entry: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other people's files, and what an interrupted first save left, are no checkpoint: the target, and a warning."""
    (tmp_path / entry).parent.mkdir(exist_ok=True)
    (tmp_path / entry).write_bytes(b"x")
    target = {"a": 1}
    with caplog.at_level(logging.WARNING, "flax_ckpt_compat"):
        assert checkpoints.restore_checkpoint(tmp_path, target) is target
    assert "holds no checkpoint" in caplog.text


def test_directories_that_nobody_may_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is not there is just that, also where its directory cannot be searched for what was set aside."""

    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    target = {"a": 1}
    assert checkpoints.restore_checkpoint(tmp_path / "absent", target) is target
