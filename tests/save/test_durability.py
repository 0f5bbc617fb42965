"""What a save has synced to disk when its name counts, and in which order old checkpoints go."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.local import syncing
from tests.support.saves import around, refuse, save_by

TREE = {"w": np.arange(200_000.0), "small": {"b": np.ones(3)}, "name": "text"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_all_is_synced_before_the_name_counts(
    flag: bool, overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file and directory of a checkpoint first, then, under its name, the directory that it lies in."""
    final = tmp_path / "run" / "checkpoint_1"
    final.parent.mkdir()
    if overwrite:
        checkpoints.save_checkpoint(final.parent, {"old": 1}, 1)
    old = os.stat(final).st_ino if overwrite else None
    before, after, synced = set(), set(), dict[int, Any]()

    def noting(descriptor: int) -> None:
        there, status = os.stat(final).st_ino if final.exists() else None, os.stat(descriptor)
        (before if there == old else after).add(status.st_ino)
        is_directory = stat.S_ISDIR(status.st_mode)
        synced[status.st_ino] = sorted(os.listdir(descriptor)) if is_directory else status.st_size

    around(monkeypatch, os, "fsync", noting)
    checkpoints.save_checkpoint(final.parent, {**TREE, "on_device": jnp.ones(3)}, 1, overwrite=overwrite)
    files = [final, *final.rglob("*")]
    assert len(files) >= (10 if flag else 1)
    assert [file for file in files if os.stat(file).st_ino not in before] == []
    for file in files:  # with all that is in it
        assert synced[os.stat(file).st_ino] == (sorted(os.listdir(file)) if file.is_dir() else file.stat().st_size)
    assert os.stat(final.parent).st_ino in after


Changes = list[tuple[str, Path]]


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> Changes:
    """Record of (call, path) for each call that changes or syncs names; a link and a rename count for both paths."""
    seen: Changes = []

    def record(name: str) -> None:
        real = getattr(os, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            folder = Path(os.readlink(f"/proc/self/fd/{options['dir_fd']}")) if options.get("dir_fd") else Path()
            if name == "fsync":
                seen.append((name, Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))))
            else:
                seen.extend((name, folder / path) for path in arguments if isinstance(path, (str, Path)))
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, recorded)

    for name in ("fsync", "unlink", "rmdir", "rename", "replace", "link"):
        record(name)
    return seen


def position(changes: Changes, call: str, path: Path, after: int = -1) -> int:
    """Index of the first such call behind another."""
    return next(number for number, change in enumerate(changes) if number > after and change == (call, path))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("new", "keep"), [(5, 1), (5, 9), (12, 1)])
@pytest.mark.parametrize("arrays", [False, True])
def test_removals_are_synced(
    flag: bool, arrays: bool, new: int, keep: int, background: bool, tmp_path: Path, changes: Changes
) -> None:
    """A power loss brings back no removed step, and no half of one: names are synced before contents go.

    Wherever an eviction ends, no checkpoint is gone that is newer than one that stays."""
    for step in (2, 9, 10):
        checkpoints.save_checkpoint(tmp_path, TREE, step, keep=9)
        if arrays and not flag:
            (tmp_path / f"checkpoint_{step}_gda" / "w").mkdir(parents=True)
            (tmp_path / f"checkpoint_{step}_gda" / "w" / ".zarray").write_text("{}")
    changes.clear()
    manager = checkpoints.AsyncManager() if background else None
    save_by(manager, tmp_path, TREE, new, keep=keep, overwrite=True)
    assert checkpoints.available_steps(tmp_path) == [2, new][2 - min(keep, 2) :]
    hide = "rename" if flag else "unlink"
    removed = [tmp_path / f"checkpoint_{step}" for step in (2, 9, 10)[keep > 1 :]]
    mains = [position(changes, hide, path) for path in removed]
    assert new == 5 or mains == sorted(mains)
    synced = position(changes, "fsync", tmp_path, max(mains))
    hidden = []
    if arrays and not flag:
        hidden = [position(changes, "rename", path.with_name(f"{path.name}_gda"), synced) for path in removed]
        synced = position(changes, "fsync", tmp_path, max(hidden))
    unlinked = [(number, path) for number, (call, path) in enumerate(changes) if call == "unlink"]
    contents = [number for number, path in unlinked if path.parent != tmp_path and path.name != "_begun"]
    assert bool(contents) == (flag or arrays)
    assert all(number > synced for number in contents)
    # One sync publishes, and one more belongs to each phase: costs do not grow with the steps that are removed.
    assert changes.count(("fsync", tmp_path)) == 2 + bool(hidden)


def test_new_directories_are_synced_before_the_checkpoint(flag: bool, tmp_path: Path, changes: Changes) -> None:
    """A power loss after the save takes none of the directories that it made, nor those that were there."""
    checkpoints.save_checkpoint(tmp_path / "new" / "run", TREE, 1)
    published = [path for _, path in changes].index(tmp_path / "new" / "run" / "checkpoint_1")
    assert all(position(changes, "fsync", path) < published for path in (tmp_path, tmp_path / "new"))


def test_a_save_that_fails_closes_its_files(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that goes on after a full disk, step by step, does not run out of descriptors."""
    refuse(monkeypatch, "fsync", "", errno.EIO)
    with pytest.raises(errors.StorageError, match=os.strerror(errno.EIO)):
        checkpoints.save_checkpoint(tmp_path, TREE, 1)
    opened = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.lexists(link.path)]
    assert [path for path in opened if path.startswith(str(tmp_path))] == []


def fail_syncs(patch: pytest.MonkeyPatch, where: Callable[[Path], bool], number: int = errno.EIO) -> None:
    """Makes the system refuse to sync some files or directories."""
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if where(Path(os.readlink(f"/proc/self/fd/{descriptor}"))):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    patch.setattr(os, "fsync", failing)


@pytest.mark.parametrize(
    ("refused", "number"),
    [(Path.is_dir, errno.EACCES), (Path.is_dir, errno.EINVAL), (Path.is_file, errno.ENOSYS), (bool, errno.EINVAL)],
)
def test_what_cannot_be_synced_is_said_once(
    flag: bool, refused: Callable[[Path], bool], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Saves work on file systems without such a call, and warn once that a power loss may undo them."""
    fail_syncs(monkeypatch, refused, number)
    monkeypatch.setattr(syncing, "_warned", set())
    for step in range(3):
        checkpoints.save_checkpoint(tmp_path, TREE, step)
    assert os.listdir(tmp_path) == ["checkpoint_2"]
    assert flax_ckpt_compat.verify(tmp_path).ok
    (said,) = (record.getMessage() for record in caplog.records if "cannot be synced" in record.getMessage())
    assert os.strerror(number) in said


def test_what_was_replaced_stays_if_the_exchange_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may still have the old name, so the old contents stay until a later save syncs."""
    flax_ckpt_compat.save(tmp_path / "c", {"a": 1}, format="orbax")
    inode = os.stat(tmp_path / "c").st_ino
    with monkeypatch.context() as patch:
        fail_syncs(patch, lambda path: path == tmp_path and os.stat(tmp_path / "c").st_ino != inode)
        with pytest.raises(errors.StorageError, match=os.strerror(errno.EIO)):
            flax_ckpt_compat.save(tmp_path / "c", {"a": 2}, format="orbax", overwrite=True)
    (old,) = (one for one in tmp_path.iterdir() if os.stat(one).st_ino == inode)
    assert flax_ckpt_compat.restore(old) == {"a": 1}
    flax_ckpt_compat.save(tmp_path / "c", {"a": 3}, format="orbax", overwrite=True)
    assert os.listdir(tmp_path) == ["c"]


def test_a_failed_sync_keeps_what_a_removal_hid(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save says that it is complete and the removal is not; the next one removes the rest."""
    checkpoints.save_checkpoint(tmp_path, TREE, 1)
    with monkeypatch.context() as patch:
        fail_syncs(patch, lambda _: not (tmp_path / "checkpoint_1").exists())
        with pytest.raises(errors.CleanupError, match="was saved"):
            checkpoints.save_checkpoint(tmp_path, TREE, 2)
    assert checkpoints.available_steps(tmp_path) == [2]
    assert len(os.listdir(tmp_path)) == 1 + flag
    checkpoints.save_checkpoint(tmp_path, TREE, 3)
    assert os.listdir(tmp_path) == ["checkpoint_3"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_orbaxs_checkpointer_wrote_is_synced_before_others_go(
    overwrite: bool, tmp_path: Path, changes: Changes
) -> None:
    """Orbax does not sync its files; no older checkpoint is removed before they are on the disk."""
    import orbax.checkpoint as ocp

    for step in (1, 1 if overwrite else 2):
        changes.clear()
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpoints.save_checkpoint(
                tmp_path, {"a": np.ones(3)}, step, overwrite=overwrite, orbax_checkpointer=checkpointer
            )
    hidden = [("unlink", "_METADATA"), *([] if overwrite else [("rename", "checkpoint_1")])]
    removed = min(number for number, (call, path) in enumerate(changes) if (call, path.name) in hidden)
    synced = {path.name for call, path in changes[:removed] if call == "fsync"}
    assert synced >= {"_METADATA", "manifest.ocdbt", "d", "_CHECKPOINT_METADATA", tmp_path.name}
