"""Temporaries, publishing and removal: nothing is lost to a dead writer, and nothing is taken from a live one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat._core import steps, storage_errors
from flax_ckpt_compat._core.errors import ProcessTimeoutError
from flax_ckpt_compat._core.local import atomic, directories, removal, temporaries
from flax_ckpt_compat.errors import StorageError
from tests.support.saves import dead_pid, names, run_python

DAY = 24 * 3600


def make(path: str | Path, text: str, kind: str) -> None:
    """A checkpoint-like file or directory."""
    path = Path(path)
    if kind == "file":
        path.write_text(text)
    else:
        path.mkdir()
        (path / "data").write_text(text)


def old_and_new(folder: Path) -> str:
    """Makes a directory ``c_1``, and a temporary that is to replace it; the temporary's path."""
    make(folder / "c_1", "old", "directory")
    temporary = atomic.temporary_path(str(folder / "c_1"))
    make(temporary, "new", "directory")
    return temporary


def read(path: str | Path) -> str:
    """What `make` put there."""
    path = Path(path)
    return (path / "data").read_text() if path.is_dir() else path.read_text()


def temporary_of(pid: int, path: Path, role: str = "new", start: int | None = None) -> str:
    """The temporary path that a process with this id would choose."""
    mine = atomic.temporary_path(str(path), role)
    own = f"-{os.getpid()}-{temporaries.start_time(os.getpid())}-"
    assert own in mine
    return mine.replace(own, f"-{pid}-{max(1, temporaries.start_time(pid)) if start is None else start}-")


def of_other_machine(path: str) -> str:
    """Renames a temporary so that another machine seems to have made it."""
    name = os.path.basename(path).replace(temporaries.machine(), "0" * 12)
    moved = os.path.join(os.path.dirname(path), name)
    os.rename(path, moved)
    return moved


@pytest.fixture
def dead() -> int:
    """The id of a process that has ended."""
    return dead_pid()


@pytest.fixture
def living() -> Iterator[int]:
    """The id of another process that lives."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid


@pytest.fixture(params=["file", "directory"])
def kind(request: pytest.FixtureRequest) -> str:
    """What a checkpoint is: a msgpack file or an Orbax directory."""
    return str(request.param)


def test_an_error_of_ours_stays_what_it_is(tmp_path: Path) -> None:
    """A time limit is an OSError of Python's, and no failure of the disk."""
    late = ProcessTimeoutError("process 1 did not come", absent=(1,))
    with pytest.raises(ProcessTimeoutError) as caught, storage_errors.writing(str(tmp_path / "c"), str(tmp_path / "t")):
        raise late
    assert caught.value is late


def test_a_system_without_proc_has_a_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing tells boots and pid namespaces apart, such as on macOS, it is the host."""

    def absent(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(temporaries, "open", absent, raising=False)
    monkeypatch.setattr(temporaries.os, "readlink", absent)
    expected = hashlib.sha256(platform.node().encode()).hexdigest()[:12]
    assert temporaries.machine.__wrapped__() == expected


@pytest.mark.parametrize("make_name", [atomic.temporary_path, atomic.staging_path])
def test_no_temporary_is_taken_for_a_checkpoint(tmp_path: Path, make_name: object) -> None:
    """Neither legacy Flax, nor Orbax, nor we list a temporary, whatever its checkpoint is called."""
    for name in ("checkpoint_7", "7", "checkpoint_best"):
        make(make_name(str(tmp_path / name)), "x", "directory")  # type: ignore[operator]
    for prefix in ("checkpoint_", "", "."):
        assert flax_checkpoints._all_checkpoints(tmp_path, prefix) == []
        assert steps.in_order(names(tmp_path), prefix) == []
        assert not any(steps.is_text(name, prefix) for name in names(tmp_path))
    assert ocp.utils.checkpoint_steps(tmp_path) == []
    assert all(atomic.is_temporary(name) for name in names(tmp_path))


def test_names_of_users_are_no_temporaries() -> None:
    """Only names of our own making are ever reclaimed."""
    others = ["checkpoint_7", "checkpoint_tmp", "c_7.orbax-checkpoint-tmp", ".hidden", "c_7_gda", ".c_7.abc-1-2-3new"]
    assert not any(atomic.is_temporary(name) for name in others)


def test_long_names_have_temporaries_too(tmp_path: Path) -> None:
    """A name as long as the file system allows can be saved, replaced and discarded."""
    for name in ("n" * 255, "é" * 127):
        final = str(tmp_path / name)
        for text in "ab":
            temporary = atomic.temporary_path(final)
            make(temporary, text, "directory")
            atomic.publish(temporary, final)
            assert read(final) == text
        # Where the name is that long, there are no arrays beside it.
        assert atomic.discard([final, f"{final}_gda"]) == {}
    assert names(tmp_path) == []


def test_a_long_name_has_a_live_writer_too(tmp_path: Path, living: int, dead: int) -> None:
    """Its temporary tells only the beginning of it, which may be that of others: they count as being written, too."""
    make(temporary_of(living, tmp_path / ("n" * 250)), "x", "file")
    make(temporary_of(dead, tmp_path / ("m" * 250)), "x", "file")
    found = [atomic.has_live_writer(str(tmp_path / name)) for name in ("n" * 250, "n" * 249 + "x", "n", "m" * 250)]
    assert found == [True, True, False, False]


@pytest.mark.parametrize("role", ["new", "old"])
def test_temporaries_are_no_longer_than_names_may_be(role: str, tmp_path: Path) -> None:
    """Nor is the folder of arrays beside a new one; a name that would not fit whole cannot be set aside."""
    limit, refused = os.pathconf(tmp_path, "PC_NAME_MAX"), 0
    for length in range(100, limit + 1):
        try:
            found = os.path.basename(atomic.temporary_path(str(tmp_path / ("n" * length)), role))
        except StorageError:
            refused += 1
        else:
            assert len(found) + len("_gda") * (role == "new") <= limit
    assert (refused > 0) == (role == "old")


def test_two_temporaries_never_share_a_name(tmp_path: Path) -> None:
    """Each call gives a new name."""
    path = str(tmp_path / "c_1")
    assert len({atomic.temporary_path(path) for _ in range(100)}) == 100


def test_publish_replaces_old_by_new(tmp_path: Path, kind: str) -> None:
    """Afterwards the final name holds the new content, and nothing else is left."""
    for text in "abc":
        temporary = atomic.temporary_path(str(tmp_path / "c_1"))
        make(temporary, text, kind)
        atomic.publish(temporary, str(tmp_path / "c_1"))
        assert read(tmp_path / "c_1") == text
        assert names(tmp_path) == ["c_1"]


@pytest.mark.parametrize("exchange", [True, False])
def test_publish_replaces_one_format_by_the_other(
    tmp_path: Path, kind: str, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory takes the place of a file and the other way round, also where names cannot be exchanged."""
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    make(tmp_path / "c_1", "old", "directory" if kind == "file" else "file")
    temporary = atomic.temporary_path(str(tmp_path / "c_1"))
    make(temporary, "new", kind)
    atomic.publish(temporary, str(tmp_path / "c_1"))
    assert (read(tmp_path / "c_1"), names(tmp_path)) == ("new", ["c_1"])


def test_publish_replaces_a_link_and_not_what_it_points_to(tmp_path: Path, kind: str) -> None:
    """A checkpoint that is a symbolic link is replaced; the checkpoint behind it stays."""
    make(tmp_path / "elsewhere", "kept", kind)
    (tmp_path / "c_1").symlink_to(tmp_path / "elsewhere")
    temporary = atomic.temporary_path(str(tmp_path / "c_1"))
    make(temporary, "new", kind)
    atomic.publish(temporary, str(tmp_path / "c_1"))
    assert (read(tmp_path / "c_1"), read(tmp_path / "elsewhere")) == ("new", "kept")
    assert atomic.discard([str(tmp_path / "c_1")]) == {}
    assert names(tmp_path) == ["elsewhere"]


def test_publish_when_another_process_publishes_first(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that appears under the name at the last moment is replaced like any other."""
    temporary = atomic.temporary_path(str(tmp_path / "c_1"))
    make(temporary, "second", kind)
    replace = os.replace

    def too_late(source: str, target: str) -> None:
        make(target, "first", kind)
        replace(source, target)

    monkeypatch.setattr(os, "replace", too_late)
    atomic.publish(temporary, str(tmp_path / "c_1"))
    assert (read(tmp_path / "c_1"), names(tmp_path)) == ("second", ["c_1"])


def test_publish_when_another_process_evicts_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that vanishes while it is being replaced is not an error."""
    temporary = old_and_new(tmp_path)

    def too_late(_: str, target: str) -> bool:
        atomic.discard([target])
        return False

    monkeypatch.setattr(atomic, "_exchange", too_late)
    atomic.publish(temporary, str(tmp_path / "c_1"))
    assert (read(tmp_path / "c_1"), names(tmp_path)) == ("new", ["c_1"])


def test_without_exchange_a_crash_between_the_renames_is_mended(
    tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old checkpoint, set aside by a writer that died, is put back before leftovers are removed."""
    final = tmp_path / "c_1"
    make(temporary_of(dead, final, "old"), "old", "directory")
    make(temporary_of(dead, final, "new"), "half", "directory")
    atomic.remove_stale(str(tmp_path))
    assert (read(final), names(tmp_path)) == ("old", ["c_1"])


def test_a_system_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C libraries of older systems have no such function; then a directory is replaced with two renames."""
    for text in "ab":
        temporary = atomic.temporary_path(str(tmp_path / "c_1"))
        make(temporary, text, "directory")
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
        atomic.publish(temporary, str(tmp_path / "c_1"))
        assert read(tmp_path / "c_1") == text
    assert names(tmp_path) == ["c_1"]


def test_what_is_being_deleted_is_never_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that ends while it deletes what it replaced leaves a part of it, which must not get the name again."""
    temporary = old_and_new(tmp_path)

    def interrupted(path: str) -> None:
        os.unlink(os.path.join(path, "data"))
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    monkeypatch.setattr(atomic, "delete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic.publish(temporary, str(tmp_path / "c_1"))
    monkeypatch.undo()
    atomic.discard([str(tmp_path / "c_1")])  # as another process may, later
    (left,) = names(tmp_path)
    temporaries.abandon(left)
    assert atomic.restore_set_aside(str(tmp_path), [left]) == []
    assert atomic.remove_stale(str(tmp_path)) == [left]
    assert names(tmp_path) == []


def test_without_exchange_a_failing_rename_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the new one cannot take the name, the old one has it again and the error is a StorageError."""
    temporary = old_and_new(tmp_path)
    rename = os.rename

    def refuse(source: str, target: str) -> None:
        if source == temporary:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(StorageError):
        atomic.publish(temporary, str(tmp_path / "c_1"))
    assert read(tmp_path / "c_1") == "old"


def test_without_exchange_what_cannot_be_put_back_is_put_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither rename works for a while: the next look-up of the same process finds the old checkpoint."""
    temporary = old_and_new(tmp_path)
    rename = os.rename

    def refuse(source: str, target: str) -> None:
        if target == str(tmp_path / "c_1"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(StorageError):
        atomic.publish(temporary, str(tmp_path / "c_1"))
    monkeypatch.setattr(os, "rename", rename)
    assert atomic.restore_set_aside(str(tmp_path), names(tmp_path)) == ["c_1"]
    assert read(tmp_path / "c_1") == "old"


@pytest.mark.parametrize(("at", "left"), [(0, "old"), (1, "new"), (2, "new")], ids=["first", "second", "sync"])
def test_without_exchange_a_replacement_that_is_interrupted(
    tmp_path: Path, at: int, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during a rename or the sync: one of the two is there, and the other one does not come back later."""
    temporary, final, steps_left = old_and_new(tmp_path), str(tmp_path / "c_1"), [False] * at + [True]

    def interrupted(call: Callable[..., None], *paths: str) -> None:
        call(*paths)
        if steps_left and steps_left.pop(0):
            signal.raise_signal(signal.SIGINT)  # as one that arrives in the system call

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_exchange", lambda *_: False)
        patch.setattr(os, "rename", partial(interrupted, os.rename))
        patch.setattr(atomic, "sync_directory", partial(interrupted, atomic.sync_directory))
        with pytest.raises(KeyboardInterrupt):
            atomic.publish(temporary, final)
    assert read(final) == left
    atomic.remove_temporary(temporary)  # as the save does
    atomic.remove_stale(str(tmp_path))  # as the next one does
    assert names(tmp_path) == ["c_1"]


def test_without_exchange_what_was_replaced_goes_though_the_sync_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a later process would put it back, as what a dead writer set aside, once the new one is evicted."""
    temporary = old_and_new(tmp_path)

    def refuse(_: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_exchange", lambda *_: False)
        patch.setattr(atomic, "sync_directory", refuse)
        with pytest.raises(StorageError):
            atomic.publish(temporary, str(tmp_path / "c_1"))
    assert read(tmp_path / "c_1") == "new"
    assert len(atomic.remove_stale(str(tmp_path))) == 1
    assert names(tmp_path) == ["c_1"]


def test_reclaim_removes_the_dead_and_spares_the_living(tmp_path: Path, kind: str, dead: int, living: int) -> None:
    """A temporary goes when its process has ended; a living process's and our own stay."""
    final = tmp_path / "c_1"
    stays = [temporary_of(living, final), atomic.temporary_path(str(final))]
    goes = [temporary_of(dead, final, start=123), temporary_of(living, final, start=1)]  # a pid that is in use again
    for path in (*stays, *goes):
        make(path, "x", kind)
    assert sorted(atomic.remove_stale(str(tmp_path))) == sorted(os.path.basename(path) for path in goes)
    assert names(tmp_path) == sorted(os.path.basename(path) for path in stays)


def test_a_zombie_counts_as_dead(tmp_path: Path) -> None:
    """A killed writer whose parent never collects it does not hold its leftovers for ever."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        leftover = temporary_of(process.pid, tmp_path / "c_1")
        make(leftover, "x", "file")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert atomic.remove_stale(str(tmp_path)) == [os.path.basename(leftover)]


@pytest.mark.parametrize(("age", "left"), [(DAY / 2, 1), (2 * DAY, 0)])
def test_another_machines_temporary_goes_after_a_day(
    tmp_path: Path, age: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether another machine's writer lives is judged by how long ago it changed anything."""
    temporary = atomic.temporary_path(str(tmp_path / "c_1"))
    make(temporary, "x", "directory")
    of_other_machine(temporary)
    now = time.time()
    monkeypatch.setattr(temporaries, "storage_time", lambda _: now + age)
    atomic.remove_stale(str(tmp_path))
    assert len(names(tmp_path)) == left


@pytest.mark.parametrize(("age", "left"), [(DAY / 48, 2), (DAY / 12, 1)])
def test_what_another_machine_replaced_goes_after_an_hour(
    tmp_path: Path, age: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer needs milliseconds with it, and it takes the space of a checkpoint."""
    temporary = atomic.temporary_path(str(tmp_path / "c_1"), "old")
    make(temporary, "old", "directory")
    make(tmp_path / "c_1", "new", "directory")
    of_other_machine(temporary)
    now = time.time()
    monkeypatch.setattr(temporaries, "storage_time", lambda _: now + age)
    atomic.remove_stale(str(tmp_path))
    assert len(names(tmp_path)) == left


@pytest.mark.parametrize("role", ["new", "old"])
def test_another_machine_that_still_writes(tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file below counts, and the rename that set an old checkpoint aside, which does not change its files."""
    temporary = Path(atomic.temporary_path(str(tmp_path / "c_1"), role))
    make(temporary, "x", "directory")
    written, now = time.time() + (2 * DAY if role == "new" else -9 * DAY), time.time()
    os.utime(temporary / "data", (written, written))
    os.utime(temporary, (now - 9 * DAY, now - 9 * DAY))
    moved = of_other_machine(str(temporary))
    monkeypatch.setattr(temporaries, "storage_time", lambda _: now + (2.5 * DAY if role == "new" else 0))
    make(tmp_path / "c_1", "new", "directory")
    assert atomic.remove_stale(str(tmp_path)) == []
    assert set(names(tmp_path)) == {"c_1", os.path.basename(moved)}


@pytest.mark.parametrize("jump", [10 * DAY, -10 * DAY])
def test_a_clock_that_is_wrong_ends_no_other_machines_save(
    tmp_path: Path, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ages are by the clock that dates the files, so that a machine's own may jump by days, or be that far off."""
    for role in ("new", "old"):
        temporary = atomic.temporary_path(str(tmp_path / f"c_{role}"), role)
        make(temporary, "x", "directory")
        of_other_machine(temporary)
    make(tmp_path / "c_old", "what replaced it", "directory")
    before, now = names(tmp_path), time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump)
    atomic.remove_stale(str(tmp_path))
    assert names(tmp_path) == before


def test_what_was_set_aside_before_a_reboot_is_put_back(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same for other machines: a writer needs milliseconds there, and after a while there is none."""
    monkeypatch.setattr(atomic, "_SWAP_SECONDS", 0.1)
    aside = atomic.temporary_path(str(tmp_path / "c_1"), "old")
    make(aside, "old", kind)
    moved = of_other_machine(aside)
    assert atomic.restore_set_aside(str(tmp_path), [os.path.basename(moved)]) == ["c_1"]
    assert (read(tmp_path / "c_1"), names(tmp_path)) == ("old", ["c_1"])


def test_recover_never_replaces_a_checkpoint(tmp_path: Path, kind: str, dead: int) -> None:
    """Where the name is taken again, what was set aside is old and goes."""
    make(tmp_path / "c_1", "new", kind)
    aside = temporary_of(dead, tmp_path / "c_1", "old")
    make(aside, "old", kind)
    assert not atomic.rename_new(aside, str(tmp_path / "c_1"))
    atomic.remove_stale(str(tmp_path))
    assert (read(tmp_path / "c_1"), names(tmp_path)) == ("new", ["c_1"])


def test_a_directory_that_may_not_be_listed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename needs no permission to list what it replaces."""
    real = os.scandir

    def denied(path: Any = ".") -> Any:
        if str(path) == str(tmp_path / "c_1"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    make(tmp_path / "c_1", "old", "directory")
    make(tmp_path / "new", "new", "directory")
    monkeypatch.setattr(os, "scandir", denied)
    assert not atomic.rename_new(str(tmp_path / "new"), str(tmp_path / "c_1"))
    assert read(tmp_path / "c_1") == "old"


def test_clean_up_by_two_writers_at_once_is_no_error(
    tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leftover that another process removes in the same moment does not fail a save."""
    make(temporary_of(dead, tmp_path / "c_1"), "x", "file")
    delete = atomic.delete

    def delete_twice(path: str) -> None:
        delete(path)
        delete(path)

    monkeypatch.setattr(atomic, "delete", delete_twice)
    atomic.remove_stale(str(tmp_path))
    assert names(tmp_path) == []


def test_a_leftover_that_cannot_be_removed_stops_nobody(
    tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's leftover in a shared directory is named in a warning, and the save goes on."""
    leftover = temporary_of(dead, tmp_path / "c_1")
    make(leftover, "x", "file")

    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(atomic, "delete", refuse)
    assert atomic.remove_stale(str(tmp_path)) == []
    assert leftover in caplog.text


def _rename_of_sftp(rename: Callable[[str, str], None], *, onto_files: bool) -> Callable[[str, str], None]:
    def renamed(source: str, target: str) -> None:
        if os.path.lexists(target) and not (onto_files and os.path.isfile(target)):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)
        rename(source, target)

    return renamed


def test_links_in_what_is_removed_are_not_followed(tmp_path: Path) -> None:
    """A link in a checkpoint goes, and the files that it leads to stay."""
    for name in ("c_1", "elsewhere"):
        make(tmp_path / name, name, "directory")
    (tmp_path / "c_1" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "c_1" / "file").symlink_to(tmp_path / "elsewhere" / "data")
    assert atomic.discard([str(tmp_path / "c_1")]) == {}
    assert (names(tmp_path), read(tmp_path / "elsewhere")) == (["elsewhere"], "elsewhere")


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_lock_is_waited_for_and_given_up(tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another one has it, a writer waits for the given time, and then goes on without it."""
    monkeypatch.setattr(removal, "_LOCK_SECONDS", seconds)
    has_it, waited = threading.Event(), threading.Event()

    def other() -> None:
        with removal.locked(str(tmp_path)):
            has_it.set()
            waited.wait(60 if seconds == 0 else 0.1)
            order.append("other")

    order: list[str] = []
    thread = threading.Thread(target=other)
    thread.start()
    assert has_it.wait(60)
    with removal.locked(str(tmp_path)):
        order.append("this")
    waited.set()
    thread.join()
    assert order == (["this", "other"] if seconds == 0 else ["other", "this"])


def test_a_lock_ends_though_a_fork_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may fork meanwhile, as data loaders do: the child has the descriptor as long as it lives."""
    held: list[int] = []
    lock = removal.lock_in_time

    def forked(descriptor: int, operation: int, seconds: float) -> None:
        lock(descriptor, operation, seconds)
        held.append(os.dup(descriptor))  # to the system, a fork's is this

    monkeypatch.setattr(removal, "lock_in_time", forked)
    with removal.locked(str(tmp_path)):
        pass
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        for descriptor in (other, *held):
            os.close(descriptor)


def test_a_forked_child_is_another_writer(tmp_path: Path) -> None:
    """After fork, parent and child choose different temporaries."""
    out, _ = run_python(FORK, tmp_path / "c_1")
    first, second = out.split()
    assert first != second


FORK = """
import os, sys
from flax_ckpt_compat._core.local import atomic as files
files.temporary_path(sys.argv[1])
child = os.fork()
os.write(1, files.temporary_path(sys.argv[1]).encode() + b"\\n")
if child:
    os.waitpid(child, 0)
"""


def test_errors_of_the_system_become_storage_errors(tmp_path: Path) -> None:
    """The message names the path, the number is kept, and the system's error is the cause."""
    with pytest.raises(StorageError, match="nowhere") as caught:
        atomic.remove_stale(str(tmp_path / "nowhere"))
    assert caught.value.errno == errno.ENOENT
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert caught.value.path == str(tmp_path / "nowhere")


def test_a_directory_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    """make_directory raises StorageError where a file is in the way."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below" / "further"):
        with pytest.raises(StorageError, match=f"^{tmp_path}/file is a file; a directory was expected$") as caught:
            directories.make_directory(str(path))
        assert caught.value.errno == errno.ENOTDIR and caught.value.path == str(tmp_path / "file")


def test_no_room_for_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that cannot take one more name: the error says what to do."""

    def link(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    temporary = tmp_path / "temporary"
    temporary.write_bytes(b"1")
    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="checkpoint_1: No space left on device; free space, or") as told:
        atomic.publish(str(temporary), str(tmp_path / "checkpoint_1"), new=True)
    assert told.value.errno == errno.ENOSPC
