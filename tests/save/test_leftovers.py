"""What interrupted saves left, and what a clean-up cannot remove: nothing goes that a live writer may still write."""

import errno
import json
import os
import shutil
import time
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner, Result

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, config, errors, restore, verify
from flax_ckpt_compat._core import progress
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic, gda_folder, temporaries
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._discovery import saved_steps
from flax_ckpt_compat._save import interrupted_saves, pipeline
from flax_ckpt_compat.cli import main
from tests.support.corpus import ARCHIVES
from tests.support.saves import around, as_nobody, later, names, refuse, save_by, start_python, tree, use_flag

GDA = ARCHIVES.parent / "gda" / "two_processes_tree"
# A writer of ours: writes a save, says so, and waits until it is killed.
HELD = """
import signal, sys
import flax, numpy as np
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.local import atomic
flax.config.update("flax_use_orbax_checkpointing", sys.argv[2] == "True")
def hold(*arguments, **_):
    print("written", flush=True)
    signal.pause()
atomic.publish = hold
checkpoints.save_checkpoint(sys.argv[1], {"n": 1.0, "w": np.full(3, 1, np.float32)}, 9, prefix="held_")
"""


def clean(*arguments: object) -> Result:
    """Runs the command in this process; nobody is at its terminal."""
    return CliRunner().invoke(main, ["clean", *map(str, arguments)])


def below(directory: Path) -> list[str]:
    """All files and directories below, sorted."""
    return sorted(os.path.relpath(path, directory) for path in directory.rglob("*"))


@pytest.mark.parametrize("by", ["save", "clean"])
def test_a_killed_writer(flag: bool, tmp_path: Path, by: str) -> None:
    """While it lives, saves and ``clean`` spare its temporary; after kill -9 it is removed, and no checkpoint is."""
    process = start_python(HELD, tmp_path, flag)
    try:
        assert process.stdout.readline() == "written\n"
        for step in range(3):
            checkpoints.save_checkpoint(tmp_path, {"n": step}, step)
        before = below(tmp_path)
        result = clean(tmp_path, "--yes")
        assert (result.exit_code, "0 to remove" in result.stdout) == (0, True)
        assert "its writer may be running" in result.stdout
        assert below(tmp_path) == before and len(os.listdir(tmp_path)) == 2
    finally:
        process.kill()
        process.communicate()
    assert checkpoints.latest_checkpoint(tmp_path, "held_") is None
    (found,) = interrupted_saves.find_leftovers(location_of(tmp_path))
    assert (found.nbytes > 0, found.kept, found.what) == (True, "", "unfinished save of held_9")
    assert clean(tmp_path, "--dry-run").exit_code == 1
    assert below(tmp_path) == before
    if by == "save":
        checkpoints.save_checkpoint(tmp_path, {"n": 2}, 2, overwrite=True)
    else:
        assert clean(tmp_path, "--yes").exit_code == 0
    assert os.listdir(tmp_path) == ["checkpoint_2"]


def test_others_keep_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfinished saves of real Orbax and real Flax name no process: they stay until nothing changed for a day."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint_1", {"x": np.ones(3)})
    shutil.copytree(tmp_path / "checkpoint_1", tmp_path / "checkpoint_2.orbax-checkpoint-tmp")
    (tmp_path / "checkpoint_tmp").write_bytes(b"\x81")
    arrays = GDA / "checkpoint_3_gda"
    shutil.copytree(arrays, tmp_path / "checkpoint_tmp_gda")  # of several processes
    (tmp_path / "my_tmp").write_bytes(b"mine")
    before = below(tmp_path)
    assert "0 to remove" in clean(tmp_path, "--yes").stdout
    assert below(tmp_path) == before
    later(monkeypatch)
    result = clean(tmp_path, "--yes")
    assert "Removed 3 of 3." in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "my_tmp"]
    assert not verify(tmp_path).damaged


@pytest.mark.parametrize("by", ["save", "clean"])
def test_orphaned_arrays(flag: bool, tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder and file may be moved one after the other: arrays go when their file is gone for a day, and not before.

    What cannot be removed is named; other files beside the arrays stay."""
    run, orphan = tmp_path / "a", tmp_path / "a" / "checkpoint_3_gda"
    for name in ("a", "b"):
        shutil.copytree(GDA, tmp_path / name)
    (orphan / "notes.txt").write_text("mine")
    (run / "my_gda").mkdir()
    before = below(tmp_path)

    def remove() -> None:
        if by == "clean":
            assert clean(tmp_path, "--yes").exit_code == 0
        else:
            saved = Path(checkpoints.save_checkpoint(run, {}, 4, keep=9))
            shutil.rmtree(saved) if flag else saved.unlink()

    (run / "checkpoint_3").rename(tmp_path / "moved")
    remove()
    (tmp_path / "moved").rename(run / "checkpoint_3")
    assert below(tmp_path) == before
    (run / "checkpoint_3").unlink()
    later(monkeypatch)
    (found,) = interrupted_saves.find_leftovers(location_of(tmp_path))
    assert (found.location.path, found.kept) == (str(orphan), "")
    refused = patch.object(gda_folder, "remove_orphan", side_effect=PermissionError(errno.EACCES, "Permission denied"))
    with refused, pytest.raises(StorageError, match=f"{orphan}: Permission denied"):
        interrupted_saves.remove(found)
    remove()
    assert below(run) == ["checkpoint_3_gda", "checkpoint_3_gda/notes.txt", "expected.json", "my_gda"]
    assert not verify(tmp_path / "b").damaged


def test_checkpoints_that_are_named_like_arrays_or_temporaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax directories of any release are not leftovers, whatever their name, for clean and for later saves."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        for name in ("model_gda", "checkpoint_3_gda", "checkpoint_tmp"):
            checkpointer.save(tmp_path / name, {"x": np.ones(3), "y_gda": np.ones(2)})
    for name in ("old_gda", "checkpoint_2_gda"):  # as before Orbax 0.2, whose tree is in the file "checkpoint" alone
        shutil.copytree(tmp_path / "model_gda", tmp_path / name)
        for file in list((tmp_path / name).iterdir()):
            if file.is_file():
                file.unlink()
        (tmp_path / name / "checkpoint").write_bytes(b"\x82\xa1x\xabPLACEHOLDER\xa5y_gda\xabPLACEHOLDER")
    before = below(tmp_path)
    later(monkeypatch)
    assert interrupted_saves.find_leftovers(location_of(tmp_path)) == []
    checkpoints.save_checkpoint(tmp_path, {"n": 1}, 4)
    assert set(before) < set(below(tmp_path))


def test_a_generation_that_appears_during_the_removal(tmp_path: Path) -> None:
    """A save that begins while an orphan is removed writes to a generation, which is new and stays."""
    folder = tmp_path / "checkpoint_3_gda"
    shutil.copytree(GDA / "checkpoint_3_gda", folder)
    generation = temporaries.generation_of(atomic.temporary_path(str(tmp_path / "checkpoint_3")))
    assert generation is not None
    shutil.copytree(folder / "params", folder / generation / "params")
    gda_folder.remove_orphan(str(folder))
    assert [path.name for path in folder.iterdir()] == [generation]
    assert (folder / generation / "params" / "xy" / ".zarray").exists()


def test_links_between_arrays_without_their_file(tmp_path: Path) -> None:
    """What a user linked into the folder of arrays stays, with all that it leads to; the arrays in the folder go."""
    arrays = GDA / "checkpoint_3_gda"
    for name in ("checkpoint_3_gda", "elsewhere"):
        shutil.copytree(arrays, tmp_path / name)
    before = below(tmp_path / "elsewhere")
    (tmp_path / "checkpoint_3_gda" / "linked").symlink_to(tmp_path / "elsewhere")
    chunk = tmp_path / "checkpoint_3_gda" / "params" / "xy" / "9.9"
    chunk.symlink_to(tmp_path / "elsewhere" / "params" / "xy" / "0.0")
    gda_folder.remove_orphan(str(tmp_path / "checkpoint_3_gda"))
    assert below(tmp_path / "elsewhere") == before
    left = {path.name for path in (tmp_path / "checkpoint_3_gda").rglob("*") if path.is_symlink() or path.is_file()}
    assert left == {"linked", "9.9"}


def test_what_was_set_aside_is_put_back(tmp_path: Path) -> None:
    """A checkpoint that a dead writer set aside is the only copy: it gets its name back."""
    with use_flag(False):
        path = checkpoints.save_checkpoint(tmp_path, {"x": 1}, 1)
    aside = atomic.temporary_path(path, "old")
    os.rename(path, aside)
    (found,) = interrupted_saves.find_leftovers(location_of(tmp_path))
    assert found.what == "checkpoint_1, set aside: it is put back"
    assert clean(tmp_path, "--yes").exit_code == 0
    assert checkpoints.restore_checkpoint(path, None) == {"x": 1}


def test_nobody_to_ask(tmp_path: Path) -> None:
    """Without a terminal and without --yes, nothing is removed: exit code 2. A typo in the path is one, too."""
    leftover = Path(atomic.temporary_path(str(tmp_path / "checkpoint_1")))
    leftover.touch()
    result = clean(tmp_path)
    assert result.exit_code == 2 and "pass --yes" in result.stderr
    assert leftover.exists()
    (found,) = json.loads(clean(tmp_path, "--json", "--dry-run").stdout)
    assert (found["path"], found["nbytes"], found["kept"]) == (str(leftover), 0, "")
    assert clean(tmp_path / "nowhere").exit_code == 2


def test_a_writer_of_orbax_that_goes_on_after_the_list_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its temporary could go when it was listed; what was changed since stays."""
    (tmp_path / "checkpoint_2.orbax-checkpoint-tmp").mkdir()
    with monkeypatch.context() as a_day_later:
        later(a_day_later)
        (found,) = interrupted_saves.find_leftovers(location_of(tmp_path))
        assert not found.kept
    assert not interrupted_saves.remove(found)
    assert os.path.exists(found.location.path)
    values = tmp_path / "checkpoint_3.partial_save"  # which is kept for what it holds, however old
    values.mkdir()
    (found,) = interrupted_saves.in_folder(location_of(tmp_path), [values.name])
    assert not interrupted_saves.remove(found, force=True)


def test_what_stays_is_told_by_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system refuses, or a writer has gone on, programs learn that something is left."""
    (tmp_path / "checkpoint_2.orbax-checkpoint-tmp").mkdir()
    later(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(interrupted_saves, "remove", lambda *_, **__: False)
        result = clean(tmp_path, "--yes")
    assert ("Removed 0 of 1." in result.stdout, result.exit_code) == (True, 1)
    assert clean(tmp_path, "--yes").exit_code == 0


# A committed save whose clean-up fails says that the step was saved, and loses no later one


def undeletable(patch: pytest.MonkeyPatch) -> None:
    """Lets the system refuse to remove step 1, as it does below directories of other users."""
    for call in ("unlink", "rename"):
        refuse(patch, call, "checkpoint_1")


def test_the_error_says_that_the_step_was_saved(flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the new checkpoint first, then what stays; the other old checkpoints are removed all the same."""
    for step in (1, 2):
        checkpoints.save_checkpoint(tmp_path, tree(step), step, keep=0)
    with monkeypatch.context() as patch, pytest.raises(errors.CleanupError) as caught:
        undeletable(patch)
        checkpoints.save_checkpoint(tmp_path, tree(3), 3)
    assert str(caught.value).startswith(f"{tmp_path}/checkpoint_3 was saved, but ")
    assert f"{tmp_path}/checkpoint_1: Permission denied" in str(caught.value)
    assert isinstance(caught.value, OSError) and caught.value.errno == 13
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_3"]
    assert checkpoints.restore_checkpoint(tmp_path, None)["n"] == 3
    checkpoints.save_checkpoint(tmp_path, tree(4), 4)
    assert names(tmp_path) == ["checkpoint_4"]


def test_in_the_background_it_is_logged_and_stops_no_later_save(
    flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error raised at the next save would keep that one from being saved."""
    manager = checkpoints.AsyncManager()
    save_by(manager, tmp_path, tree(1), 1)
    undeletable(monkeypatch)
    for step in (2, 3):
        save_by(manager, tmp_path, tree(step), step)
        assert caplog.text.count(f"checkpoint_{step} was saved, but") == 1
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_3"]


def test_a_replaced_checkpoint_that_cannot_be_removed(
    flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What overwriting set aside may stay; the save is complete, and a warning names what is left."""
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "checkpoint_1" / "_METADATA").write_text("{}")
    with patch.object(atomic, "delete", side_effect=PermissionError(13, "Permission denied")):
        checkpoints.save_checkpoint(tmp_path, tree(1), 1, overwrite=True)
    assert checkpoints.restore_checkpoint(tmp_path, None)["n"] == 1
    assert "which was replaced" in caplog.text


def test_arrays_stay_with_a_checkpoint_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A msgpack file without the folder beside it would look complete, and not restore."""
    array = tmp_path / "checkpoint_1_gda" / "w" / ".zarray"
    with use_flag(False):
        checkpoints.save_checkpoint(tmp_path, tree(1), 1)
        array.parent.mkdir(parents=True)
        array.write_text("{}")
        with monkeypatch.context() as patch:
            refuse(patch, "unlink", "checkpoint_1")
            with pytest.raises(errors.CleanupError, match="checkpoint_2 was saved, but"):
                checkpoints.save_checkpoint(tmp_path, tree(2), 2)
        assert array.exists()
        checkpoints.save_checkpoint(tmp_path, tree(3), 3)
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
    checkpoints.save_checkpoint(tmp_path, tree(1), 2)
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
            checkpoints.save_checkpoint(tmp_path, tree(1), 1, overwrite=True)
    assert os.listdir(tmp_path) == ["checkpoint_1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_in_a_shared_directory_another_users_step_stays_whole(open_path: Path) -> None:
    """Its folder could be renamed, and not emptied: it would take space under a hidden name."""
    run = open_path / "run"
    flax_ckpt_compat.save(run, tree(1), step=1, format="orbax")
    run.chmod(0o777)
    with as_nobody():
        with pytest.raises(errors.CleanupError, match="Permission denied"):
            flax_ckpt_compat.save(run, tree(2), step=2, format="orbax", keep=1)
        assert checkpoints.available_steps(run) == [1, 2]
        assert flax_ckpt_compat.restore(run, step=1)["n"] == 1
    assert names(run) == ["checkpoint_1", "checkpoint_2"]


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
        checkpoints.save_checkpoint(tmp_path, {"a": np.ones(3_000_000)}, 1)
    assert made and checkpoints.available_steps(tmp_path) == ([] if is_removed else [1])


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
    run = tmp_path / "run"
    with use_flag(flag):
        save(run, 1)
        os.utime(run / "checkpoint_1", (0, 0))  # so that it cannot be what has evicted the new one
        around(monkeypatch, pipeline, "retain", lambda *_: remove(run / f"checkpoint_{step}"))
        with pytest.raises(errors.StorageError, match=told):
            save(run, step, keep=1)
    assert kind == "all" or restore(run / "checkpoint_1")["n"] == 1.0


def test_a_listing_that_misses_the_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that changes while it is listed may be listed without a name that is there all the time."""
    real, missed = saved_steps.all_names, list[str]()

    def names_in(checkpoint_dir: Any) -> list[str]:
        found = real(checkpoint_dir)
        if "checkpoint_2" in found and not missed:
            missed.append("checkpoint_2")
            found.remove("checkpoint_2")
        return found

    with use_flag(False):
        save(tmp_path, 1)
        os.utime(tmp_path / "checkpoint_1", (0, 0))
        monkeypatch.setattr(saved_steps, "all_names", names_in)
        save(tmp_path, 2, overwrite=True, keep=1)
    assert missed
    assert names(tmp_path) == ["checkpoint_2"]
