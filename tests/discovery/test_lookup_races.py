"""A reader beside a writer: checkpoints that are rotated away, replaced and removed while they are looked at.

And after one: what dead writers set aside, and directories that were never finished."""

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.local import atomic, temporaries
from flax_ckpt_compat._discovery import locating, saved_steps
from flax_ckpt_compat._discovery.saved_steps import checkpoint_dir
from tests.support.interrupting import count_calls, interrupted
from tests.support.logs import warnings_logged
from tests.support.saves import dead_pid, names, set_aside, start_python, tree, use_flag

TARGET = {"w": np.zeros(3, np.float32), "n": 0.0}


def read_open(directory: Path, step: Any = None) -> Any:
    """Open a checkpoint and read all of it."""
    with flax_ckpt_compat.open_checkpoint(directory, step) as opened:
        return opened.read()


def number_of_plan(directory: Path, step: Any = None) -> Any:
    """Return the step that a plan is of, in the form of a tree."""
    path = flax_ckpt_compat.plan_restore(directory, TARGET, step=step).path
    return tree(int(path.rpartition("_")[2]))


READS: dict[str, Callable[..., Any]] = {
    "restore_checkpoint": lambda directory, step=None: checkpoints.restore_checkpoint(directory, TARGET, step),
    "without a target": lambda directory, step=None: checkpoints.restore_checkpoint(directory, None, step),
    "restore": lambda directory, step=None: flax_ckpt_compat.restore(directory, TARGET, step=step),
    "open_checkpoint": read_open,
    "plan_restore": number_of_plan,
}
LOOKUPS: dict[str, Callable[[Path], Any]] = {
    "latest_checkpoint": lambda directory: int(str(checkpoints.latest_checkpoint(directory)).rpartition("_")[2]),
    "available_steps": lambda directory: checkpoints.available_steps(directory)[-1],
    "iter_checkpoints": lambda directory: list(flax_ckpt_compat.iter_checkpoints(directory))[-1].step,
}
# What each of them finds as the latest step; each tree has its step in it.
LOOKS = LOOKUPS | {name: lambda directory, read=read: read(directory)["n"] for name, read in READS.items()}


@pytest.mark.parametrize("look", LOOKS)
def test_a_list_that_misses_names_once(look: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lists do that are made while names change: before nothing is there, the directory is listed again."""
    checkpoints.save_checkpoint(tmp_path, tree(7), 7)
    list_names, lists = saved_steps.all_names, list[int]()

    def miss_once(directory: saved_steps.CheckpointDir) -> list[str]:
        lists.append(1)
        return list_names(directory) if len(lists) > 1 else []

    monkeypatch.setattr(saved_steps, "all_names", miss_once)
    assert LOOKS[look](tmp_path) == 7
    assert len(lists) > 1


class Rotation:
    """A directory in which step 1 is the only one, until a trainer commits step 2 and removes step 1."""

    def __init__(self, folder: Path):
        self.directory, self._next = folder / "run", folder / "next"
        checkpoints.save_checkpoint(self._next, tree(1), 1)
        checkpoints.save_checkpoint(self._next, tree(2), 2, keep=2)
        self.reset()

    def reset(self) -> None:
        """Put step 1 back as the only one."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        self._copy("checkpoint_1")

    def _copy(self, name: str) -> None:
        source = self._next / name
        temporary = self.directory.parent / "copied"
        if source.is_dir():
            shutil.copytree(source, temporary, copy_function=os.link)
        else:
            os.link(source, temporary)
        os.rename(temporary, self.directory / name)

    def remove(self) -> None:
        """Remove step 1 at once, as our own clean-up does."""
        path = self.directory / "checkpoint_1"
        if path.exists():
            removed = path.rename(self.directory.parent / "doomed")
            shutil.rmtree(removed) if removed.is_dir() else removed.unlink()

    def rotate(self) -> None:
        """Commit step 2, then remove step 1."""
        self._copy("checkpoint_2")
        self.remove()


def each_call(call: Callable[[], Any], stride: int = 7) -> range:
    """Return numbers of its calls into the system, and one more; every one where the environment says so.

    The first run warms caches up.
    """
    call()
    calls = count_calls(call)
    assert calls > 1
    return range(1, calls + 2, 1 if "TEST_EVERY_CALL" in os.environ else stride)


@pytest.mark.slow
@pytest.mark.parametrize("how", READS)
def test_rotation_before_each_call_of_a_restore(how: str, flag: bool, tmp_path: Path) -> None:
    """Wherever the trainer rotates, the restore gives one of the two steps whole, and never the target's own values."""
    rotation = Rotation(tmp_path)
    read = READS[how]
    for at in each_call(lambda: read(rotation.directory)):
        rotation.reset()
        found = interrupted(lambda: read(rotation.directory), at, rotation.rotate)
        assert found["n"] in (1, 2), at
        np.testing.assert_array_equal(found["w"], tree(found["n"])["w"])


@pytest.mark.parametrize("how", LOOKUPS)
def test_rotation_before_each_call_of_a_look_up(how: str, flag: bool, tmp_path: Path) -> None:
    """Look-ups name one of the two steps, never nothing."""
    rotation = Rotation(tmp_path)
    look_up = LOOKUPS[how]
    for at in each_call(lambda: look_up(rotation.directory), 2):
        rotation.reset()
        assert interrupted(lambda: look_up(rotation.directory), at, rotation.rotate) in (1, 2), at


@pytest.mark.slow
@pytest.mark.parametrize("how", READS)
def test_removal_of_a_named_step_before_each_call(how: str, flag: bool, tmp_path: Path) -> None:
    """It restores whole, or is an error that says that it was removed, or is not there; nothing else."""
    rotation = Rotation(tmp_path)
    read = READS[how]
    told = set()
    for at in each_call(lambda: read(rotation.directory, 1), 2):
        rotation.reset()
        try:
            assert interrupted(lambda: read(rotation.directory, 1), at, rotation.remove)["n"] == 1
        except errors.CheckpointNotFoundError as error:
            told.add("removed while it was read" in str(error))
            assert "Matching checkpoint not found" in str(error) or "was removed while it was read" in str(error)
            assert "from a backup" not in str(error)
    assert True in told


# Real Orbax leaves reads behind in an event loop that it has closed, when files vanish under it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("make", [ocp.PyTreeCheckpointer, ocp.StandardCheckpointer])
def test_rotation_with_a_given_checkpointer(make: Callable[[], Any], tmp_path: Path) -> None:
    """Real Orbax as the reader fails in its own ways when the checkpoint goes; the restore takes the new latest."""
    with use_flag(True), make() as reader:
        rotation = Rotation(tmp_path)

        def read(step: Any = None) -> Any:
            return checkpoints.restore_checkpoint(rotation.directory, TARGET, step, orbax_checkpointer=reader)

        read()
        for at in each_call(read, 23):
            rotation.reset()
            assert interrupted(read, at, rotation.rotate)["n"] in (1, 2), at
            rotation.reset()
            try:
                assert interrupted(lambda: read(1), at, rotation.remove)["n"] == 1
            except errors.CheckpointNotFoundError as error:
                assert "not found" in str(error) or "was removed while it was read" in str(error)


def test_the_only_checkpoint_goes_away(flag: bool, tmp_path: Path) -> None:
    """Without another one that is an error, and not the untouched target."""
    rotation = Rotation(tmp_path)

    def read() -> Any:
        return checkpoints.restore_checkpoint(rotation.directory, TARGET)

    told = []
    for at in each_call(read):
        rotation.reset()
        try:
            found = interrupted(read, at, rotation.remove)
            assert found["n"] == 1 or found is TARGET
        except errors.CheckpointNotFoundError as error:
            told.append(str(error))
    assert told and all("removed while it was read, and there is no other" in message for message in told)


@pytest.mark.parametrize("how", LOOKS)
def test_another_machine_removes_what_is_listed(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, reading on in a directory that another machine has removed is ESTALE, and not ENOENT."""
    with use_flag(True):
        for step in (1, 2):
            checkpoints.save_checkpoint(tmp_path, tree(step), step, keep=2)
    listdir, doomed = os.listdir, tmp_path / "checkpoint_2"

    def stale(path: Any) -> list[str]:
        if Path(path) == doomed and doomed.exists():
            shutil.rmtree(doomed)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", stale)
    assert LOOKS[how](tmp_path) == 1
    assert not doomed.exists(), "nothing was listed"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN, errno.EACCES], ids=errno.errorcode.get)
def test_a_disk_that_goes_away_with_an_error(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that failed is not taken for an empty one because the mount is gone at the next look."""
    checkpoints.save_checkpoint(tmp_path / "run", {"a": 1}, 1)
    real = os.listdir

    def listdir(path: Any = ".") -> list[str]:
        if os.fspath(path) == str(tmp_path / "run"):
            shutil.rmtree(path, ignore_errors=True)
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(errors.StorageError, match=os.strerror(number)):
        checkpoints.restore_checkpoint(tmp_path / "run", {"a": -1})


@pytest.mark.parametrize("how", LOOKS)
def test_a_stale_mount_is_not_an_empty_directory(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each call gives ESTALE, as after an NFS server began anew, a program must not train from initial values."""
    checkpoints.save_checkpoint(tmp_path, tree(1), 1)

    def stale(function: Any) -> Any:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if str(path).startswith(str(tmp_path)):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return function(path, *args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("listdir", "stat", "lstat", "open"):
            patch.setattr(os, name, stale(getattr(os, name)))
        with pytest.raises(errors.StorageError, match=os.strerror(errno.ESTALE)):
            LOOKS[how](tmp_path)


def test_a_reader_that_is_overtaken_again_and_again(tmp_path: Path) -> None:
    """It takes the new latest each time, and says what to do where that does not end."""
    step = 1
    checkpoints.save_checkpoint(tmp_path, tree(step), step)

    def overtaken(path: str, times: int) -> str:
        nonlocal step
        if step > times:
            return path
        step += 1
        checkpoints.save_checkpoint(tmp_path, tree(step), step)
        raise FileNotFoundError(path)

    run = checkpoint_dir(str(tmp_path), "checkpoint_")

    def read(times: int) -> str:
        return locating.read_found(run, None, lambda found: overtaken(found.path, times))

    assert read(14) == str(tmp_path / "checkpoint_15")
    with pytest.raises(errors.CheckpointNotFoundError, match=r"as were \d+ before it; keep more checkpoints"):
        read(1000)
    assert step == 15 + saved_steps.ROUNDS, "its look-ups take no rounds of their own"


def test_a_step_that_is_overwritten_again_and_again(flag: bool, tmp_path: Path) -> None:
    """A reader gets the old or the new values, never some of each."""
    for value in (1.0, 2.0):
        big = {f"a{i}": np.full(5, value, np.float32) for i in range(9)}
        checkpoints.save_checkpoint(tmp_path / str(value), big, 1)
    path = tmp_path / "run" / "checkpoint_1"
    path.parent.mkdir()
    values = itertools.cycle((1.0, 2.0))

    def overwrite() -> None:
        # What a save does last; a whole save in this thread could wait for a lock that the reader holds.
        source, temporary = tmp_path / str(next(values)) / "checkpoint_1", atomic.temporary_path(str(path))
        if source.is_dir():
            shutil.copytree(source, temporary)
        else:
            shutil.copy2(source, temporary)
        atomic.publish(temporary, str(path))

    def read() -> Any:
        return checkpoints.restore_checkpoint(path.parent, None, 1)

    overwrite()
    for at in each_call(read):
        found = interrupted(read, at, overwrite)
        assert len({float(array[0]) for array in found.values()}) == 1, at


def test_a_checkpoint_that_is_open_goes_away(flag: bool, tmp_path: Path) -> None:
    """Reading from what was opened works, or says that it was removed."""
    checkpoints.save_checkpoint(tmp_path, tree(1), 1)
    with flax_ckpt_compat.open_checkpoint(tmp_path) as opened:
        checkpoints.save_checkpoint(tmp_path, tree(2), 2)
        try:
            assert opened.read()["n"] == 1
        except errors.CheckpointNotFoundError as error:
            assert "was removed while it was read" in str(error)


WRITER = """
import sys

import flax
import numpy as np
from flax_ckpt_compat import checkpoints

flax.config.update("flax_use_orbax_checkpointing", sys.argv[2] == "True")
step = 0
while True:
    step += 1
    checkpoints.save_checkpoint(sys.argv[1], {"w": np.full(3, step, np.float32), "n": float(step)}, step)
    if step == 1:
        print("begun", flush=True)
"""


def test_a_reader_beside_a_writer(flag: bool, tmp_path: Path) -> None:
    """A real trainer saves as fast as it can with keep=1; every look-up and restore finds a checkpoint."""
    rounds = int(os.environ.get("TEST_READS", "60"))
    writer = start_python(WRITER, tmp_path, flag)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "begun\n"
        newest = 0.0
        for _ in range(rounds):
            assert checkpoints.latest_checkpoint(tmp_path) is not None
            found = checkpoints.restore_checkpoint(tmp_path, TARGET)
            assert found["n"] >= max(newest, 1)
            np.testing.assert_array_equal(found["w"], tree(found["n"])["w"])
            newest = found["n"]
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.communicate()


def _once(folder: Path, found: Callable[[str], list[str]]) -> Callable[..., list[str]]:
    """Return `os.listdir`, whose first call for a directory returns ``found`` of it."""
    real, calls = os.listdir, list[str]()

    def listdir(path: Any = ".") -> list[str]:
        if str(path) == str(folder) and not calls:
            calls.append(str(path))
            return found(str(path))
        return real(path)

    return listdir


def _replaced(path: str) -> list[str]:
    """Replace the directory while it is open, and delete its contents."""
    aside, new = f"{path}.tmp1", f"{path}.tmp2"
    shutil.copytree(path, new)
    os.rename(path, aside)
    os.rename(new, path)
    shutil.rmtree(aside)
    return []


def _missing(path: str) -> list[str]:
    """Fail between two renames."""
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def kept(directory: Path) -> int:
    """Save a third step, which evicts the first."""
    checkpoints.save_checkpoint(directory, tree(3), 3, keep=2)
    assert sorted(os.listdir(directory)) == ["checkpoint_2", "checkpoint_3"]
    return 2


def find_second(look: str, flag: bool, patch: pytest.MonkeyPatch, folder: Path, *of: Any) -> None:
    """Look at two steps, with one listing as told; the second is the latest, and whole at each moment."""
    with use_flag(flag), warnings_logged() as logged:
        for step in (1, 2):
            checkpoints.save_checkpoint(folder, tree(step), step, keep=5)
        patch.setattr(os, "listdir", _once(*of))
        assert (LOOKS | {"kept": kept})[look](folder) == 2
    assert not logged


ALL = pytest.mark.parametrize("look", [*LOOKS, "kept"])


@ALL
@pytest.mark.parametrize("during", [_replaced, _missing])
@pytest.mark.parametrize("exchanges", [True, False])
def test_the_directory_is_replaced_while_it_is_listed(during, exchanges, look, tmp_path, monkeypatch):
    """It looked empty or absent, and the step before it was restored: 4 of 10,318 restores beside a writer."""
    if not exchanges:
        monkeypatch.setattr(atomic, "exchange", lambda *_: False)
    find_second(look, True, monkeypatch, tmp_path, tmp_path / "checkpoint_2", during)


@ALL
def test_the_name_is_missing_in_a_listing_between_two_renames(flag, look, tmp_path, monkeypatch):
    """Where names cannot be exchanged, as on NFS; the writer has finished when the listing is read."""

    def listed(path: str) -> list[str]:
        aside = os.path.basename(atomic.temporary_path(os.path.join(path, "checkpoint_2"), "old"))
        return ["checkpoint_1", aside]

    find_second(look, flag, monkeypatch, tmp_path, tmp_path, listed)


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
