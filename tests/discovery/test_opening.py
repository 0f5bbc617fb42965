"""Which checkpoint a path means: what dead writers set aside, and directories that were never finished."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.local import atomic, temporaries
from tests.support.saves import dead_pid, names, set_aside, tree, use_flag


@pytest.mark.parametrize("name", ["run_1", "42", "run"])
def test_what_a_killed_first_save_left_is_not_a_step(name: str, tmp_path: Path) -> None:
    """A restart in a directory that is named like a step begins anew, as in any other; it raised at each restart."""
    root = tmp_path / name
    with use_flag(True):
        saved = Path(checkpoints.save_checkpoint(root, tree(1), 1))
    left = Path(atomic.temporary_path(str(saved)))
    for written_last in ("commit_success.txt", "_CHECKPOINT_METADATA"):
        (saved / written_last).unlink()
    (saved / "_begun").touch()
    saved.rename(left.with_name(left.name.replace(f"-{os.getpid()}-", f"-{dead_pid()}-")))
    target = tree(0)
    assert checkpoints.restore_checkpoint(root, target) is target
    assert checkpoints.latest_checkpoint(root) is None


def _of_another_machine(temporary: str) -> str:
    return temporary.replace(f"{temporaries._machine()}-{temporaries._boot()}", f"{0:012}-{0:012}")


@pytest.mark.parametrize(
    ("writer", "how"),
    [
        *(("that is dead", how) for how in ("directory", "step", "own path")),
        ("of another machine", "directory"),
        ("that hangs", "directory"),
    ],
)
def test_checkpoints_set_aside_restore(
    writer: str, how: str, flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was killed between two renames, and goes on here or elsewhere, gets its checkpoint.

    Where names cannot be exchanged, as on NFS, a replacement takes two renames."""
    monkeypatch.setattr(atomic, "_SWAP_SECONDS", 0.2)
    path = Path(checkpoints.save_checkpoint(tmp_path, tree(1), 1))
    aside = atomic.temporary_path(str(path), "old")
    if writer == "that is dead":
        set_aside(path)
    else:
        path.rename(_of_another_machine(aside) if writer == "of another machine" else aside)
    assert names(tmp_path) != ["checkpoint_1"]
    where, step = {"directory": (tmp_path, None), "step": (tmp_path, 1), "own path": (path, None)}[how]
    np.testing.assert_array_equal(checkpoints.restore_checkpoint(where, tree(0), step)["w"], tree(1)["w"])
    assert names(tmp_path) == ["checkpoint_1"]
    with pytest.raises(OSError):  # so the writer, if it goes on, fails
        os.rename(checkpoints.save_checkpoint(tmp_path / "other", tree(2), 1), path if path.is_dir() else path / "x")


def test_what_was_replaced_does_not_come_back_once_its_step_is_evicted(flag: bool, tmp_path: Path) -> None:
    """Another machine replaced step 1, and was switched off before it had removed the old one."""
    path = Path(checkpoints.save_checkpoint(tmp_path, tree(1), 1))
    aside = Path(_of_another_machine(atomic.temporary_path(str(path), "old")))
    path.rename(aside)
    Path(checkpoints.save_checkpoint(tmp_path / "other", tree(2), 1)).rename(path)
    checkpoints.save_checkpoint(tmp_path, tree(3), 2, keep=2)
    assert aside.exists()  # it may be needed while its writer may live
    checkpoints.save_checkpoint(tmp_path, tree(4), 3, keep=2)
    assert checkpoints.available_steps(tmp_path) == [2, 3] and not aside.exists()


def test_a_checkpoint_that_is_being_replaced_is_waited_for(flag: bool, tmp_path: Path) -> None:
    """A reader between the two renames of a writer gets what that has written."""
    path = Path(checkpoints.save_checkpoint(tmp_path, tree(1), 1))
    new = Path(checkpoints.save_checkpoint(tmp_path / "other", tree(2), 1))
    aside = Path(atomic.temporary_path(str(path), "old"))
    path.rename(aside)
    timer = threading.Timer(0.3, new.rename, [path])
    timer.start()
    np.testing.assert_array_equal(checkpoints.restore_checkpoint(tmp_path, tree(0))["w"], tree(2)["w"])
    timer.join()
    assert aside.exists()  # its writer removes it
