"""What a machine sees of a network file system that other machines change: old lists, for up to a minute.

The stand-in remembers names and files, as sshfs does, until this machine itself changes the directory. Real sshfs was
tried by hand: without the rules that are tested here, a reader beside a writer got its target's own values back in 280
of 335 restores.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.local import directories
from flax_ckpt_compat._core.local.storage import LocalStorage
from flax_ckpt_compat._discovery import locating, step_lookup
from flax_ckpt_compat._restore import pipeline
from flax_ckpt_compat.errors import CheckpointError, CheckpointNotFoundError, InvalidCheckpointError, StorageError
from tests.support.saves import names, tree, use_flag


class Client:
    """This machine's view of a folder: the names, and which of them are files, as they were when it last looked."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self._folder, self._listed, self._files = str(folder), None, dict[str, os.stat_result]()
        self._listdir, self._stats = os.listdir, {name: getattr(os, name) for name in ("stat", "lstat")}
        self._open = os.open
        patch.setattr(os, "listdir", self.listdir)
        patch.setattr(os, "open", self.open)
        for name in self._stats:
            patch.setattr(
                os, name, lambda path, *rest, _name=name, **options: self.status(_name, path, *rest, **options)
            )
        patch.setattr(LocalStorage, "is_shared", staticmethod(lambda _: True))
        patch.setattr(directories, "is_shared", lambda _: True)

    def listdir(self, path: Any = ".") -> list[str]:
        if str(path) != self._folder:
            return self._listdir(path)
        if self._listed is None:
            self._listed = self._listdir(path)
            self._files = {name: self._stats["lstat"](os.path.join(path, name)) for name in self._listed}
        return list(self._listed)

    def status(self, name: str, path: Any, *rest: Any, **options: Any) -> os.stat_result:
        folder, last = os.path.split(str(path))
        if folder == self._folder and last in self._files and stat.S_ISREG(self._files[last].st_mode):
            return self._files[last]
        return self._stats[name](path, *rest, **options)  # type: ignore[no-any-return]

    def open(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and os.path.dirname(str(path)) == self._folder:
            self.forget()
        return self._open(path, flags, *rest, **options)

    def forget(self) -> None:
        self._listed, self._files = None, {}


@pytest.fixture
def run(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Client]]:
    """A folder with steps 1 and 2 that this machine has seen, where another one has since saved 3 and 4 with keep=2."""
    folder = tmp_path / "run"
    for step in (1, 2):
        checkpoints.save_checkpoint(folder, tree(step), step, keep=2)
    monkeypatch.setattr(step_lookup, "_FIRST_WAIT_SECONDS", 1e-3)
    monkeypatch.setattr(step_lookup, "_LONGEST_WAIT_SECONDS", 2e-3)
    monkeypatch.setattr(locating, "_WAITS_SECONDS", (1e-3,) * 7)
    with monkeypatch.context() as patch:
        client = Client(folder, patch)
        assert checkpoints.latest_checkpoint(folder) == str(folder / "checkpoint_2")
        saved = tmp_path / "other"
        for step in (3, 4):
            os.rename(checkpoints.save_checkpoint(saved, tree(step), step), folder / f"checkpoint_{step}")
            os.rename(folder / f"checkpoint_{step - 2}", tmp_path / f"removed_{step}")
        yield folder, client


def test_the_latest_is_what_is_there(run: tuple[Path, Client]) -> None:
    """Names that are listed and not there are no reason to return the target: the list is old."""
    folder, _ = run
    assert "checkpoint_2" in os.listdir(folder)
    np.testing.assert_array_equal(checkpoints.restore_checkpoint(folder, tree(0))["w"], tree(4)["w"])
    assert checkpoints.latest_checkpoint(folder) == str(folder / "checkpoint_4")
    assert names(folder) == ["checkpoint_3", "checkpoint_4"]


def test_a_save_is_refused_for_what_another_machine_has_saved(run: tuple[Path, Client]) -> None:
    """Step 3 is newer than what this machine remembers, and older than what is there."""
    folder, client = run
    with pytest.raises(InvalidCheckpointError, match=r"checkpoint_3 already exists"):
        checkpoints.save_checkpoint(folder, tree(3), 3)
    client.listdir(folder)
    with pytest.raises(InvalidCheckpointError, match=r"checkpoint_4 is newer"):
        checkpoints.save_checkpoint(folder, tree(2), 2.5)
    assert names(folder) == ["checkpoint_3", "checkpoint_4"]


def test_a_reader_that_may_not_write_waits(
    run: tuple[Path, Client], flag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the list to be renewed; if that does not happen, the error tells of it."""
    folder, client = run
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.restore_checkpoint(folder, tree(0))
    assert not flag or isinstance(raised.value, CheckpointNotFoundError)
    assert not flag or "still shows an old list. Try again in a minute" in str(raised.value)
    sleep, waits = time.sleep, list[float]()

    def later(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            client.forget()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", later)
    np.testing.assert_array_equal(checkpoints.restore_checkpoint(folder, tree(0))["w"], tree(4)["w"])


def test_a_list_that_was_empty_is_looked_at_again(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a restore returns its target, it makes sure that no other machine has saved meanwhile."""
    folder = tmp_path / "run"
    folder.mkdir()
    Client(folder, monkeypatch).listdir(folder)
    os.rename(checkpoints.save_checkpoint(tmp_path / "other", tree(4), 4), folder / "checkpoint_4")
    assert os.listdir(folder) == []
    np.testing.assert_array_equal(checkpoints.restore_checkpoint(folder, tree(0))["w"], tree(4)["w"])
    assert checkpoints.restore_checkpoint(tmp_path / "nothing", "target") == "target"


def test_what_was_there_is_never_the_target(run: tuple[Path, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that vanishes while it is read, the only one, is an error, though nothing is found afterwards."""
    folder, client = run
    client.forget()
    read = pipeline._Restore.at

    def too_late(restore: Any, location: Any) -> Any:
        for name in names(folder):
            os.rename(folder / name, folder.with_name(name))
        return read(restore, location)

    monkeypatch.setattr(pipeline._Restore, "at", too_late)
    with pytest.raises(CheckpointNotFoundError, match="was removed while it was read, and there is no other"):
        checkpoints.restore_checkpoint(folder, tree(0))


def test_what_is_missing_is_told_once_it_is_certain(run: tuple[Path, Client], flag: bool) -> None:
    """A checkpoint that lost a file for good, and a step that was removed, are the errors that they are on a disk."""
    folder, client = run
    client.forget()
    with pytest.raises(CheckpointNotFoundError, match="Matching checkpoint not found"):
        checkpoints.restore_checkpoint(folder, tree(0), step=1)
    if flag:
        (lost,) = (folder / "checkpoint_4" / "d").iterdir()
        lost.unlink()
        with pytest.raises(CheckpointError, match="missing"):
            checkpoints.restore_checkpoint(folder, tree(0))


@pytest.fixture
def replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with steps 1 and 2 of Orbax's format; 2 is empty for now, as GlusterFS shows one that is replaced."""
    monkeypatch.setattr(LocalStorage, "is_shared", staticmethod(lambda _: True))
    folder = tmp_path / "run"
    with use_flag(True):
        for step in (1, 2):
            checkpoints.save_checkpoint(folder, tree(step), step, keep=2)
    os.rename(folder / "checkpoint_2", tmp_path / "whole")
    (folder / "checkpoint_2").mkdir()
    return folder


@pytest.mark.parametrize(
    "there",
    [
        ("manifest.ocdbt",),
        *(pytest.param(names, marks=pytest.mark.slow) for names in ((), ("_METADATA",), ("_METADATA", "d"))),
    ],
    ids="+".join,
)
def test_a_step_that_is_being_replaced_is_waited_for(replaced: Path, there: tuple[str, ...]) -> None:
    """Neither the step before it nor the target is what a restore wants, and what is there in part is not damaged."""
    whole, shown = replaced.with_name("whole"), replaced / "checkpoint_2"
    for name in there:
        os.rename(whole / name, shown / name)

    def finish() -> None:
        for name in names(whole):
            os.rename(whole / name, shown / name)

    later = threading.Timer(0.4, finish)
    later.start()
    np.testing.assert_array_equal(checkpoints.restore_checkpoint(replaced, tree(0))["w"], tree(2)["w"])
    later.join()


@pytest.mark.slow
def test_steps_that_stay_incomplete_are_skipped(
    replaced: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for once, however many there are: then the newest complete step is restored without a delay."""
    for step in range(3, 12):
        (replaced / f"checkpoint_{step}").mkdir()
    slept, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    for _ in range(2):
        np.testing.assert_array_equal(checkpoints.restore_checkpoint(replaced, tree(0))["w"], tree(1)["w"])
        assert step_lookup._SETTLED_SECONDS <= sum(slept) < 2 * step_lookup._SETTLED_SECONDS
    assert "checkpoint_2 (the directory is empty)" in caplog.text
    assert checkpoints.available_steps(replaced) == [1]


def test_a_directory_that_fails_to_list_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GlusterFS answers EBADFD for a directory that it is renaming; an error that stays names the directory."""
    path = checkpoints.save_checkpoint(tmp_path, tree(1), 1)
    listdir, failures = os.listdir, 3

    def failing(folder: Any = ".") -> list[str]:
        nonlocal failures
        if str(folder) == str(tmp_path) and failures:
            failures -= 1
            raise OSError(errno.EBADFD, os.strerror(errno.EBADFD), folder)
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", failing)
    assert checkpoints.latest_checkpoint(tmp_path) == path
    failures = 1000
    with pytest.raises(StorageError, match="File descriptor in bad state"):
        checkpoints.latest_checkpoint(tmp_path)


def test_which_file_systems_are_shared(tmp_path: Path) -> None:
    """Disks and memory are not; what is unknown may be."""
    assert not directories.is_shared(str(tmp_path))
    assert directories.is_shared("/proc") and directories.is_shared(str(tmp_path / "absent"))
    assert not directories.refresh(str(tmp_path)) and names(tmp_path) == []
