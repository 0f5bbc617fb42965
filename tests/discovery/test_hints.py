"""What errors and warnings say of paths that hold no checkpoint, where one is near."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from orbax.checkpoint import Checkpointer, PyTreeCheckpointHandler

from flax_ckpt_compat import checkpoints, cli, errors, open_checkpoint, plan_restore, restore, save
from flax_ckpt_compat._core.local import presence
from flax_ckpt_compat._discovery import locating, saved_steps
from tests.support.saves import tree

TARGET = {"nothing": 0}
RAISING: dict[str, Callable[..., Any]] = {
    "restore": restore,
    "restore step": lambda path, **prefix: restore(path, step=7, **prefix),
    "restore_checkpoint step": lambda path, **prefix: checkpoints.restore_checkpoint(path, None, 7, **prefix),
    "open_checkpoint": open_checkpoint,
    "open_checkpoint step": lambda path, **prefix: open_checkpoint(path, 7, **prefix),
    "plan_restore": lambda path, **prefix: plan_restore(path, TARGET, **prefix),
}


def refuse(path: str) -> Any:
    """Raise as a system does that lets nobody look."""
    raise PermissionError(13, "Permission denied", path)


def error_of(call: Callable[..., Any], path: Any, **prefix: str) -> str:
    """The message of the error for a path without checkpoints, which says what to do."""
    with pytest.raises(errors.CheckpointNotFoundError) as caught:
        call(path, **prefix)
    assert caught.value.has_remedy
    assert caught.value.path is not None and os.path.isabs(caught.value.path)
    return str(caught.value)


def warning_of(path: Any, caplog: pytest.LogCaptureFixture) -> str:
    """The only warning of restore_checkpoint, which returns the target."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flax_ckpt_compat"):
        assert checkpoints.restore_checkpoint(path, TARGET) is TARGET
    (warning,) = caplog.messages
    return warning


def test_a_folder_one_level_up(format: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors and the warning name the folders below that hold checkpoints, or are one."""
    save(tmp_path / "a", tree(1), step=1, format=format)
    save(tmp_path / "b", tree(1), step=1, prefix="best_", format=format)
    (tmp_path / "c").mkdir()
    (tmp_path / "notes.txt").write_text("none")
    expected = f"there are checkpoints at {tmp_path}/a, {tmp_path}/b: pass one of these paths"
    for call in RAISING.values():
        assert expected in error_of(call, tmp_path)
    assert expected in warning_of(tmp_path, caplog)


def test_the_look_below_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Few of many folders are named, none further down is looked for, and no more than the first twenty opened."""
    for number in range(6):
        save(tmp_path / "many" / f"run{number}", tree(1), step=1, format="msgpack")
    assert f"{tmp_path}/many/run4 and 1 more: pass one" in warning_of(tmp_path / "many", caplog)
    assert warning_of(tmp_path, caplog).endswith("holds no checkpoint with the prefix 'checkpoint_'")
    for number in range(20):
        (tmp_path / "many" / f"a{number}").mkdir()
    assert warning_of(tmp_path / "many", caplog).endswith("'checkpoint_'")  # names in natural order: those are first


@pytest.mark.parametrize(("name", "steps"), [("best_", (9, 10)), ("best_11", (10, 9))])
def test_a_step_that_is_not_there(
    name: str, steps: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``runs/best_11`` beside other steps, or ``runs/best_``, is no first run: a warning names those.

    Other runs are no steps."""
    for step in (9, 10):
        save(tmp_path, tree(1), step=step, prefix="best_", format="msgpack", keep=9)
    expected = f"does not exist: did you mean {tmp_path}/best_{steps[0]}, {tmp_path}/best_{steps[1]}?"
    assert expected in error_of(restore, tmp_path / name)
    assert expected in warning_of(tmp_path / name, caplog)
    for run in ("run_1", "run_2"):
        save(tmp_path / run, tree(1), step=1, format="msgpack")
    caplog.clear()
    assert checkpoints.restore_checkpoint(tmp_path / "run_3", None) is None
    assert not caplog.records


def test_a_wrong_last_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors say what is beside it, or similar; a first run, which may begin there, is not a warning."""
    runs = tmp_path / "~alice"  # which is there
    (runs / "large").mkdir(parents=True)
    assert f"does not exist: check the path; {runs} has large" in error_of(restore, runs / "7")
    assert f"did you mean {runs}/large?" in error_of(restore, runs / "lar")
    with caplog.at_level(logging.INFO, "flax_ckpt_compat"):
        assert checkpoints.restore_checkpoint(runs / "7", TARGET) is TARGET
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize("inner", ["d", "w", "absent"])
def test_a_path_inside_a_checkpoint(inner: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Data and array folders of an Orbax checkpoint, and names that it lacks, lead to the checkpoint."""
    with Checkpointer(PyTreeCheckpointHandler(use_ocdbt=inner == "d")) as checkpointer:
        checkpointer.save(tmp_path / "run" / "checkpoint_1", {"w": tree(1)["w"]})
    path = tmp_path / "run" / "checkpoint_1" / inner
    expected = f"part of the checkpoint {tmp_path}/run/checkpoint_1: pass that path"
    for call in RAISING.values():
        assert expected in error_of(call, path)
    assert expected in warning_of(path, caplog)
    assert expected in CliRunner().invoke(cli.main, ["ls", str(path)]).output


@pytest.mark.parametrize("path", ["~/runs/a", "~root/runs", Path("~")])
def test_an_unexpanded_home(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in Flax, ``~`` is a directory's name: errors and warnings say so."""
    monkeypatch.chdir(tmp_path)
    remedy = f"{tmp_path}/{path} does not exist: '~' is not expanded, so pass os.path.expanduser(path)"
    assert remedy in error_of(restore, path)
    assert remedy in warning_of(path, caplog)
    for step in (1, 2):
        assert checkpoints.save_checkpoint(path, tree(1), step) == f"{path}/checkpoint_{step}"
    assert (tmp_path / path / "checkpoint_2").exists()
    caplog.clear()
    assert checkpoints.restore_checkpoint(path, None) is not None
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("first", "found"),
    [({"w": np.zeros(99)}, "found dict; "), (np.zeros((2, 99)), "found ndarray; "), (7, "found int; ")],
)
@pytest.mark.parametrize("call", [restore, save, plan_restore, checkpoints.restore_checkpoint])
def test_swapped_arguments(call: Callable[..., Any], first: Any, found: str) -> None:
    """A tree in the path's place is named by its type, without its values; the path is to come first."""
    end = "pass a str or a pathlib.Path; the path comes first, before the tree$"
    with pytest.raises(errors.ArgumentError, match=found + end):
        call(first, "runs")


def test_a_look_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing near may be listed, the error is the same without a hint."""
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(errors.CheckpointNotFoundError, match=r"absent does not exist$"):
        restore(tmp_path / "absent")
    assert checkpoints.restore_checkpoint(tmp_path / "absent", TARGET) is TARGET


def test_what_was_saved_since_the_look(tmp_path: Path) -> None:
    """A message names nothing that was not there when it was decided that there is no checkpoint."""
    save(tmp_path, tree(1), step=1, format="orbax")
    absence = locating.none_in(saved_steps.checkpoint_dir(str(tmp_path), "checkpoint_"), [])
    assert "checkpoint_1" not in str(absence)


@pytest.mark.parametrize("call", RAISING.values(), ids=RAISING)
def test_directories_that_do_not_exist(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is not there is told to be just that, by its absolute path, also below one that is there."""
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path}/absent does not exist" in error_of(call, "absent")
    assert f"the directory {tmp_path}/sub does not exist" in error_of(call, tmp_path, prefix="sub/checkpoint_")


@pytest.mark.parametrize("call", RAISING.values(), ids=RAISING)
def test_checkpoints_of_other_prefixes_are_suggested(
    call: Any, flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only other prefixes have checkpoints, at most five complete ones are named, with the prefix to pass."""
    monkeypatch.chdir(tmp_path)
    for step in (9, 10):
        checkpoints.save_checkpoint("runs", tree(step), step, "checkpoint_", keep=9)
    (tmp_path / "runs" / "notes_7").write_text("nothing of ours")
    (tmp_path / "runs" / "empty_1").mkdir()
    (tmp_path / "runs" / "checkpoint_11").touch()
    (tmp_path / "runs" / "run_3").mkdir()
    message = error_of(call, "runs", prefix="ckpt_")
    expected = "there are checkpoint_9, checkpoint_10: did you mean prefix='checkpoint_'?"
    assert f"{tmp_path}/runs holds no checkpoint with the prefix 'ckpt_'; {expected}" in message
    assert "did you mean prefix='runs/checkpoint_'?" in error_of(call, ".", prefix="runs/ckpt_")
    for step in range(1, 8):
        checkpoints.save_checkpoint("runs", tree(step), step, "a-", keep=9)
    assert "there are a-1, a-2, a-3, a-4, a-5: did you mean prefix='a-'?" in error_of(call, "runs", prefix="ckpt_")


def test_pointers_of_git_lfs(tmp_path: Path) -> None:
    """A model file that git-lfs never fetched is not announced as a checkpoint."""
    (tmp_path / "flax_model.msgpack").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    assert "flax_model.msgpack:" not in error_of(restore, tmp_path)
    assert f"restore {tmp_path}" not in error_of(restore, tmp_path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no other error than that there is no checkpoint: the target is returned."""
    for name in ("a.npz", "b.npz"):
        (tmp_path / name).write_bytes(b"PK")
    save(tmp_path, tree(1), step=1, prefix="best_", format="msgpack")
    monkeypatch.setattr(presence, "open_regular", refuse)
    assert checkpoints.restore_checkpoint(tmp_path, TARGET) is TARGET
