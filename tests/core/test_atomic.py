"""Publishing on a disk: temporaries, replacing or not, with and without an exchange, locks, what dead writers left."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from flax.training import checkpoints as flax_checkpoints
from orbax.checkpoint import utils as orbax_utils

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.backend import Format
from flax_ckpt_compat._core.local import atomic, presence, syncing, temporaries
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat.errors import PermissionDeniedError, StorageError
from tests.support.saves import around, before_publish, refuse

OLD_RELEASE = ".c_1.9f86d081884c-4711-53210-0{}.orbax-checkpoint-tmp_gda"  # as 1.0.0rc2 names them
WRITER = """
import sys, time
from flax_ckpt_compat._core.local import temporaries
path = temporaries.temporary_path(sys.argv[1])
temporaries.create_directory(path) if sys.argv[2] == "directory" else temporaries.create_file(path)
print(path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def unlocked() -> None:
    """Begin without the locks of other tests."""
    temporaries._forget_all()


@pytest.fixture(params=["file", "directory"])
def kind(request: pytest.FixtureRequest) -> str:
    """What a checkpoint is."""
    return str(request.param)


@pytest.fixture(params=["exchange", "two renames"])
def exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system exchanges two names."""
    if request.param == "two renames":
        monkeypatch.setattr(atomic, "exchange", lambda *_: False)
    return bool(request.param == "exchange")


def make(path: str | Path, text: str, kind: str) -> None:
    """Make a checkpoint that holds a text."""
    if kind == "directory":
        temporaries.create_directory(str(path))
        path = f"{path}/data"
    with open(temporaries.create_file(str(path)), "w") as file:
        file.write(text)


def read(path: str | Path) -> str:
    """Return the text of a checkpoint."""
    return Path(path, "data" if os.path.isdir(path) else "").read_text()


def left(directory: Path) -> list[str]:
    """Return all names in a directory."""
    return sorted(os.listdir(directory))


def elsewhere(path: str, machine: str = "0" * 12) -> str:
    """Return the name that a temporary has whose writer is of another boot, by default of another machine."""
    return path.replace(f"{temporaries._machine()}-{temporaries._boot()}", f"{machine}-{'0' * 12}")


@pytest.fixture
def final(tmp_path: Path) -> str:
    """The path of a checkpoint."""
    return str(tmp_path / "c_1")


@pytest.mark.parametrize("make_name", [temporaries.temporary_path, temporaries.staging_path])
def test_no_temporary_is_taken_for_a_checkpoint(make_name: Callable[[str], str], tmp_path: Path) -> None:
    """Neither by real Flax, nor by real Orbax; and each is another one."""
    name = make_name(str(tmp_path / "checkpoint_1"))
    assert name != make_name(str(tmp_path / "checkpoint_1"))
    make(name, "x", "directory")
    make(name + ".orbax-checkpoint-tmp-123", "x", "directory")
    assert flax_checkpoints.latest_checkpoint(str(tmp_path)) is None
    assert orbax_utils.checkpoint_steps(tmp_path) == []
    assert all(map(temporaries.parse, left(tmp_path)))
    assert temporaries.destination(name) == str(tmp_path / "checkpoint_1")


NAMES = [(OLD_RELEASE.format(role), role) for role in ("new", "old", "put")]
NAMES += [(name, None) for name in ("checkpoint_1", ".checkpoint_1", "checkpoint_1_gda", ".c.0a-1-2-3new", "c.tmp")]


@pytest.mark.parametrize(("name", "role"), NAMES)
def test_temporaries_are_told_by_their_names(name: str, role: str | None) -> None:
    """Those of old releases too, which `clean` removes after a day; names of users are none."""
    match = temporaries.parse(name)
    assert (match and (match["name"], match["role"])) == (role and ("c_1", role))


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127])
def test_long_names_have_temporaries_too(name: str, tmp_path: Path) -> None:
    """Shortened, with room for the suffix of arrays; setting aside needs the whole name."""
    path = temporaries.temporary_path(str(tmp_path / name))
    make(path + "_gda", "x", "directory")
    assert temporaries.parse(os.path.basename(path)) and temporaries.destination(path) is None
    with pytest.raises(StorageError, match="too long"):
        temporaries.temporary_path(str(tmp_path / name), "old")


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("before", ["nothing", "empty file", "empty directory", "file", "directory", "link"])
def test_publish_replaces_whatever_is_there(before: str, new: bool, kind: str, exchanges: bool, final: str) -> None:
    """Nothing else is left, and what a link leads to stays; with ``new`` only what is void gives way."""
    folder, empty = Path(final).parent, before.removeprefix("empty ")
    if before == "link":
        make(folder / "target", "old", kind)
        os.symlink(folder / "target", final)
    elif empty != before:
        Path(final).touch() if empty == "file" else os.mkdir(final)
    elif before != "nothing":
        make(final, "old", before)
    temporary = temporaries.temporary_path(final)
    make(temporary, "new", kind)
    if new and before in ("file", "directory", "link"):
        with pytest.raises(StorageError, match="another process has saved"):
            atomic.publish(temporary, final, new=True)
        assert (read(final), read(temporary)) == ("old", "new")
        return
    atomic.publish(temporary, final, new=new)
    assert read(final) == "new"
    assert left(folder) == ["c_1", *(["target"] if before == "link" else [])]
    assert before != "link" or read(folder / "target") == "old"
    assert not temporaries._held


class Stopped(BaseException):
    """What ends a save in the middle, as Ctrl-C does."""


def stop(*_: Any, **__: Any) -> None:
    """Stop there."""
    raise Stopped


def test_a_replacement_that_stops_anywhere_leaves_the_old_one_or_the_new_one(
    kind: str, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after each of its calls, with an error or Ctrl-C; what is left goes with the next look at leftovers."""
    calls = ("rename", "replace", "fsync", "rmdir", "unlink")
    for error in (Stopped(), OSError(errno.EIO, "no")):
        for late in (False, True):
            at, is_place = 0, True
            while is_place:
                at, is_place = at + 1, False
                run = tmp_path / f"{type(error).__name__}{late}{at}"
                run.mkdir()
                make(run / "c_1", "old", "directory")
                count = 0

                def stopping(name: str, error: BaseException = error, late: bool = late, at: int = at) -> Any:
                    real = getattr(os, name)

                    def call(*arguments: Any, **options: Any) -> Any:
                        nonlocal count, is_place
                        count += 1
                        if count != at:
                            return real(*arguments, **options)
                        is_place = True
                        if late:
                            real(*arguments, **options)
                        raise error

                    return call

                with monkeypatch.context() as patch:
                    try:
                        with location_of(run / "c_1").temporary() as temporary:
                            make(temporary, "new", kind)
                            for name in calls:
                                patch.setattr(os, name, stopping(name))
                            atomic.publish(temporary, str(run / "c_1"))
                    except (Stopped, StorageError):
                        pass
                there = read(run / "c_1")
                atomic.remove_stale(str(run))
                assert there in ("old", "new") and there == read(run / "c_1")
                assert left(run) == ["c_1"], (error, late, at)
                assert not temporaries._held
            assert at > 2


def test_publish_when_another_process_evicts_the_old_one(
    final: str, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one gets its name all the same."""
    temporary, replace = temporaries.temporary_path(final), os.replace

    def evicted(source: str, target: str) -> None:
        try:
            replace(source, target)
        finally:
            atomic.discard(os.path.dirname(target), [os.path.basename(target)])

    make(final, "old", "directory")
    make(temporary, "new", "directory")
    monkeypatch.setattr(os, "replace", evicted)
    atomic.publish(temporary, final)
    assert read(final) == "new"
    assert left(Path(final).parent) == ["c_1"]


@pytest.fixture
def writing(kind: str, final: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is writing a temporary, which has begun."""
    command = [sys.executable, "-c", WRITER, final, kind]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_the_dead_are_reclaimed_and_the_living_spared(
    writing: subprocess.Popen[str], final: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process is alive, one that was killed is not, be it reaped or not.

    Nothing goes whose folder cannot be synced: the rename that put another in its place may not be on the disk."""
    folder = Path(final).parent
    os.kill(writing.pid, signal.SIGSTOP)
    assert atomic.remove_stale(str(folder)) == [] and len(left(folder)) == 1
    os.kill(writing.pid, signal.SIGKILL)
    os.waitid(os.P_PID, writing.pid, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stop)
        with pytest.raises(Stopped):
            atomic.remove_stale(str(folder))
    assert len(atomic.remove_stale(str(folder))) == 1
    assert left(folder) == []


@pytest.mark.parametrize("writer", ["of another machine", "of an earlier boot", "of an old release"])
def test_what_no_lock_tells(writer: str, kind: str, final: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a reboot of this machine: dead. Else it stays for a day without a change, or until `clean --force`."""
    path, is_forced = temporaries.temporary_path(final), writer == "of another machine"
    folder = Path(final).parent
    if writer == "of an old release":
        path = str(folder / OLD_RELEASE.format("new").replace("9f86d081884c", temporaries._machine()))
    else:
        path = elsewhere(path, temporaries._machine() if writer == "of an earlier boot" else "0" * 12)
    make(path, "x", kind)
    temporaries.release(path)
    if writer != "of an earlier boot":
        os.utime(path, (0, 0))
        assert atomic.remove_stale(str(folder)) == []
        with monkeypatch.context() as jump:
            jump.setattr(time, "time", lambda: 2e10)  # nothing that is new goes because the clock jumped
            assert atomic.remove_stale(str(folder)) == []
        monkeypatch.setattr(temporaries, "_STALE_SECONDS", 24 * 3600.0 if is_forced else -1.0)
    assert atomic.remove_stale(str(folder), force=is_forced) == [os.path.basename(path)]
    assert left(folder) == []


def test_where_nothing_can_be_locked_time_tells(kind: str, final: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves work there, and what they write stays for a day."""
    monkeypatch.setattr(temporaries.fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    temporary = temporaries.temporary_path(final)
    make(temporary, "new", kind)
    assert atomic.remove_stale(os.path.dirname(final)) == []
    atomic.publish(temporary, final)
    assert read(final) == "new"


@pytest.mark.parametrize("when", ["opened", "emptied"])
def test_a_temporary_that_is_made_anew_while_it_is_cleaned(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer made it anew after the cleaner had opened, or deleted, what had the name: that stays, and locked."""
    path = temporaries.temporary_path(str(tmp_path / "checkpoint_1"))
    os.mkdir(path)
    place, name = (temporaries.fcntl, "flock") if when == "opened" else (shutil, "rmtree")
    real, empty = getattr(place, name), shutil.rmtree

    def made_anew(*arguments: Any) -> None:
        monkeypatch.undo()
        if when == "emptied":
            real(*arguments)
        else:
            empty(path)
        temporaries.create_directory(path)
        if when == "opened":
            real(*arguments)

    monkeypatch.setattr(place, name, made_anew)
    atomic._remove_leftover(path)
    assert os.path.isdir(path) and path in temporaries._held
    with temporaries.locked_if_free(path) as is_free:
        assert is_free is False
    temporaries.release(path)


@pytest.mark.parametrize("when", ["hold", "_open"])
def test_a_temporary_that_is_cleaned_before_it_is_locked(
    when: str, kind: str, final: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again, also where it was opened before: its writer never writes to what was removed."""
    real, cleaned = getattr(temporaries, when), list[str]()

    def late(path: str) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(temporaries, when, real)
            found = real(path) if when == "_open" else None
            if not cleaned:
                cleaned.extend(atomic.remove_stale(os.path.dirname(final)))
            return real(path) if found is None else found

    monkeypatch.setattr(temporaries, when, late)
    temporary = temporaries.temporary_path(final)
    make(temporary, "new", kind)
    assert cleaned == [os.path.basename(temporary)] and read(temporary) == "new"
    assert atomic.remove_stale(os.path.dirname(final)) == []


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_fork_does_not_keep_the_lock_of_a_dead_writer(kind: str, final: str) -> None:
    """Nor does it end it while the writer lives."""
    reader, pipe = os.pipe()
    writer = os.fork()
    if not writer:
        make(temporaries.temporary_path(final), "x", kind)
        if not os.fork():
            os.write(pipe, str(os.getpid()).encode())
        time.sleep(60)
    grandchild = int(os.read(reader, 20))
    try:
        assert atomic.remove_stale(os.path.dirname(final)) == []
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        assert len(atomic.remove_stale(os.path.dirname(final))) == 1
    finally:
        os.kill(grandchild, signal.SIGKILL)


@pytest.mark.parametrize("dies", [False, True])
def test_what_was_set_aside_comes_back(dies: bool, kind: str, final: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live writer is waited for, for the moment between its renames."""
    monkeypatch.setattr(atomic, "_SWAP_SECONDS", 0.1 if dies else 60.0)
    make(final, "old", kind)
    aside = temporaries.temporary_path(final, "old")
    os.rename(final, aside)
    renamed = threading.Timer(0.1, os.rename, [f"{final}_made", final])  # whole, as a writer does it
    if not dies:
        make(f"{final}_made", "new", kind)
        renamed.start()
    assert atomic.restore_set_aside(os.path.dirname(final), left(Path(final).parent)) == ["c_1"]
    assert read(final) == ("old" if dies else "new")
    if not dies:
        renamed.join()
    with monkeypatch.context() as patch, pytest.raises(Stopped) if not dies and kind == "directory" else nullcontext():
        patch.setattr(shutil, "rmtree", stop)
        atomic.remove_set_aside(os.path.dirname(final), left(Path(final).parent), ["c_1"])
    assert not atomic._set_aside(left(Path(final).parent))  # no half of it is put back
    atomic.remove_stale(os.path.dirname(final))
    assert left(Path(final).parent) == ["c_1"]


def test_two_cleaners_at_once_and_one_that_is_refused(
    final: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What another removes first is no error, and what cannot be removed stops no save."""
    for name in ("a", "b"):
        make(path := temporaries.temporary_path(os.path.join(os.path.dirname(final), name)), "x", "directory")
        temporaries.release(path)
    real = syncing.delete_tree

    def twice(path: str) -> None:
        if ".a." in path:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        real(path)
        real(path)

    monkeypatch.setattr(atomic, "delete_tree", twice)
    assert len(atomic.remove_stale(os.path.dirname(final))) == 1
    assert "left by an interrupted save" in caplog.text


def test_a_folder_that_another_process_deletes_is_not_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone, which is no failure, though ``os.access`` says no of what does not exist."""
    (tmp_path / "old/a").mkdir(parents=True)
    (tmp_path / "old/a/file").touch()
    around(monkeypatch, os, "access", lambda *_: shutil.rmtree(tmp_path / "old", ignore_errors=True))
    assert atomic.discard(str(tmp_path), ["old"]) == {}
    assert os.listdir(tmp_path) == []


def test_links_in_what_is_removed_are_not_followed(tmp_path: Path) -> None:
    """Only they go."""
    make(tmp_path / "kept", "x", "directory")
    make(tmp_path / "c_1", "x", "directory")
    (tmp_path / "c_1" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "c_2").symlink_to(tmp_path / "kept")
    assert atomic.discard(str(tmp_path), ["c_1", "c_2", "none"]) == {}
    assert left(tmp_path) == ["kept"] and read(tmp_path / "kept") == "x"


_QUESTIONS = [presence.isdir, presence.isfile, presence.lexists, presence.islink]


@pytest.mark.parametrize("ask", _QUESTIONS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EACCES])
def test_an_error_is_no_answer(ask, number, tmp_path, monkeypatch):
    """`os.path` answers False."""
    for name in ("stat", "lstat"):
        refuse(monkeypatch, name, "", number)
    expected = PermissionDeniedError if number == errno.EACCES else StorageError
    with pytest.raises(expected, match=str(tmp_path)) as raised:
        ask(str(tmp_path))
    assert raised.value.errno == number


@pytest.mark.parametrize("ask", _QUESTIONS)
def test_answers_are_those_of_os_path(ask, tmp_path):
    """Of files, directories, links, loops, names below a file, and names that no file system takes."""
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "to directory").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("", "file", "link", "to directory", "dangling", "loop", "file/below", "absent", "n" * 300):
        path = str(tmp_path / name)
        assert ask(path) == getattr(os.path, ask.__name__)(path), name
    assert not ask(str(tmp_path / "a\0b"))


PAIRS = list(itertools.product(Format, repeat=2))


@pytest.mark.parametrize("pair", PAIRS)
def test_one_of_two_saves_of_a_step_is_refused(
    tmp_path: Path, pair: tuple[Format, Format], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a step that exists is refused; what is restored is the tree of the one that said that it saved."""
    both_have_written = threading.Barrier(2, timeout=30)  # so both have passed the check before
    before_publish(monkeypatch, lambda _: both_have_written.wait())

    def save(number: int) -> str:
        tree = {"n": number, "v": np.full(3, number)}
        return flax_ckpt_compat.save(tmp_path, tree, step=1, format=pair[number].value)  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(save, number) for number in (0, 1)]
    failed = [future.exception() for future in futures]
    assert sum(error is None for error in failed) == 1, failed
    refused = next(error for error in failed if error is not None)
    assert isinstance(refused, errors.InvalidCheckpointError)
    assert "exists; pass overwrite=True" in str(refused)
    assert checkpoints.restore_checkpoint(tmp_path, None)["n"] == failed.index(None)
    assert os.listdir(tmp_path) == ["checkpoint_1"]


def test_a_file_system_without_hard_links(final: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file gets its name by a rename there, and one that is taken is refused."""
    refuse(monkeypatch, "link", "", errno.EPERM)
    for text in ("first", "second"):
        make(temporary := temporaries.temporary_path(final), text, "file")
        with pytest.raises(StorageError, match="another process has saved") if text == "second" else nullcontext():
            atomic.publish(temporary, final, new=True)
    assert read(final) == "first"


def test_what_cannot_be_emptied_is_not_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's would stay, half of it, under a hidden name."""
    make(tmp_path / "c_1", "x", "directory")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert isinstance(atomic.discard(str(tmp_path), ["c_1"])["c_1"], PermissionDeniedError)
    assert left(tmp_path) == ["c_1"] and read(tmp_path / "c_1") == "x"


def test_macos_exchanges_names_too(kind: str, final: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a function of its own; two renames would leave a moment without the checkpoint."""
    linux = syncing.function_of_libc("renameat2")

    def function(name: str) -> Any:
        return {"renamex_np": lambda old, new, flags: linux(-100, old, -100, new, flags)}.get(name)

    monkeypatch.setattr(syncing, "function_of_libc", function)
    monkeypatch.setattr(sys, "platform", "darwin")
    make(final, "old", "directory")
    make(temporary := temporaries.temporary_path(final), "new", kind)
    assert syncing.exchange(temporary, final)
    assert (read(temporary), read(final)) == ("old", "new")
