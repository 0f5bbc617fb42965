"""What ``flax-ckpt clean`` removes, and that it removes nothing that a live writer may still write."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner, Result

from flax_ckpt_compat import checkpoints, verify
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic, gda_folder, temporaries
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._save import interrupted_saves
from flax_ckpt_compat.cli import main
from tests.support.corpus import ARCHIVES
from tests.support.saves import later, use_flag

ROOT = Path(__file__).parents[2]
# A writer of ours: begins a save, says so, and is then killed or goes on waiting.
WRITER = """
import sys
import os
from flax_ckpt_compat._core.local import temporaries
path = temporaries.temporary_path(sys.argv[1])
os.write(temporaries.create_file(path), bytes(1000))
print(path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is saving step 9."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "run" / "checkpoint_9")]
    (tmp_path / "run").mkdir()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert temporaries.parse(os.path.basename(process.stdout.readline().strip()))
        yield process
        process.kill()


def clean(*arguments: object) -> Result:
    """Runs the command in this process; nobody is at its terminal."""
    return CliRunner().invoke(main, ["clean", *map(str, arguments)])


def names(directory: Path) -> list[str]:
    """All files and directories below, sorted."""
    return sorted(os.path.relpath(path, directory) for path in directory.rglob("*"))


def test_a_killed_writer(writer: subprocess.Popen[str], tmp_path: Path) -> None:
    """While it lives its temporary stays, and is listed; after kill -9 it is removed, and no checkpoint is."""
    run = tmp_path / "run"
    with use_flag(False):
        checkpoints.save_checkpoint(run, {"x": 1}, 1)
    before = names(tmp_path)
    result = clean(tmp_path, "--yes")
    assert result.exit_code == 0
    assert "its writer may be running" in result.stdout
    assert "0 to remove" in result.stdout
    assert names(tmp_path) == before
    writer.kill()
    writer.wait()
    (found,) = interrupted_saves.find_leftovers(location_of(tmp_path))
    assert (found.nbytes, found.kept, found.what) == (1000, "", "unfinished save of checkpoint_9")
    assert clean(tmp_path, "--dry-run").exit_code == 1
    assert names(tmp_path) == before
    assert clean(tmp_path, "--yes").exit_code == 0
    assert names(tmp_path) == ["run", "run/checkpoint_1"]


def test_others_keep_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfinished saves of real Orbax and real Flax name no process: they stay until nothing changed for a day."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint_1", {"x": np.ones(3)})
    shutil.copytree(tmp_path / "checkpoint_1", tmp_path / "checkpoint_2.orbax-checkpoint-tmp")
    (tmp_path / "checkpoint_tmp").write_bytes(b"\x81")
    arrays = ARCHIVES.parent / "gda" / "two_processes_tree" / "checkpoint_3_gda"
    shutil.copytree(arrays, tmp_path / "checkpoint_tmp_gda")  # of several processes
    (tmp_path / "my_tmp").write_bytes(b"mine")
    before = names(tmp_path)
    assert "0 to remove" in clean(tmp_path, "--yes").stdout
    assert names(tmp_path) == before
    later(monkeypatch)
    result = clean(tmp_path, "--yes")
    assert "Removed 3 of 3." in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "my_tmp"]
    assert not verify(tmp_path).damaged


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error of this library, whatever the system says."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    shutil.copytree(ARCHIVES.parent / "gda" / "two_processes_tree", tmp_path / "a")
    (tmp_path / "a" / "checkpoint_3").unlink()
    later(monkeypatch)
    (found,) = interrupted_saves.find_leftovers(location_of(tmp_path))
    monkeypatch.setattr(gda_folder, "remove_orphan", refuse)
    with pytest.raises(StorageError, match=f"{found.location}: Permission denied"):
        interrupted_saves.remove(found)


def test_orphaned_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of several processes go when their file is gone for a day; other files beside them stay."""
    for name in ("a", "b"):
        shutil.copytree(ARCHIVES.parent / "gda" / "two_processes_tree", tmp_path / name)
    (tmp_path / "a" / "checkpoint_3").unlink()
    (tmp_path / "a" / "checkpoint_3_gda" / "notes.txt").write_text("mine")
    (tmp_path / "a" / "my_gda").mkdir()
    before = names(tmp_path)
    assert clean(tmp_path, "--yes").exit_code == 0
    assert names(tmp_path) == before
    later(monkeypatch)
    (found,) = interrupted_saves.find_leftovers(location_of(tmp_path))
    assert (found.location.path, found.kept) == (str(tmp_path / "a" / "checkpoint_3_gda"), "")
    assert clean(tmp_path, "--yes").exit_code == 0
    assert names(tmp_path / "a") == ["checkpoint_3_gda", "checkpoint_3_gda/notes.txt", "expected.json", "my_gda"]
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
    before = names(tmp_path)
    later(monkeypatch)
    assert interrupted_saves.find_leftovers(location_of(tmp_path)) == []
    checkpoints.save_checkpoint(tmp_path, {"n": 1}, 4)
    assert set(before) < set(names(tmp_path))


def test_a_generation_that_appears_during_the_removal(tmp_path: Path) -> None:
    """A save that begins while an orphan is removed writes to a generation, which is new and stays."""
    folder = tmp_path / "checkpoint_3_gda"
    shutil.copytree(ARCHIVES.parent / "gda" / "two_processes_tree" / "checkpoint_3_gda", folder)
    generation = temporaries.generation_of(atomic.temporary_path(str(tmp_path / "checkpoint_3")))
    assert generation is not None
    shutil.copytree(folder / "params", folder / generation / "params")
    gda_folder.remove_orphan(str(folder))
    assert [path.name for path in folder.iterdir()] == [generation]
    assert (folder / generation / "params" / "xy" / ".zarray").exists()


def test_links_between_arrays_without_their_file(tmp_path: Path) -> None:
    """What a user linked into the folder of arrays stays, with all that it leads to; the arrays in the folder go."""
    arrays = ARCHIVES.parent / "gda" / "two_processes_tree" / "checkpoint_3_gda"
    for name in ("checkpoint_3_gda", "elsewhere"):
        shutil.copytree(arrays, tmp_path / name)
    before = names(tmp_path / "elsewhere")
    (tmp_path / "checkpoint_3_gda" / "linked").symlink_to(tmp_path / "elsewhere")
    chunk = tmp_path / "checkpoint_3_gda" / "params" / "xy" / "9.9"
    chunk.symlink_to(tmp_path / "elsewhere" / "params" / "xy" / "0.0")
    gda_folder.remove_orphan(str(tmp_path / "checkpoint_3_gda"))
    assert names(tmp_path / "elsewhere") == before
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
    assert result.exit_code == 2
    assert "pass --yes" in result.stderr
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
