"""Writers in containers: another host name, and other process numbers, but the same kernel, so that locks reach."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.local import atomic, temporaries, writer_locks
from flax_ckpt_compat.cli import main
from tests.reliability import shim
from tests.support.saves import names, tree, use_flag

ROOT = Path(__file__).parents[2]
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
# A program that saves one step, and stops where it would give the checkpoint its name.
WRITER = """
import os, sys
import flax, numpy as np
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.local import atomic
import socket
from tests.reliability import shim
socket.sethostname(sys.argv[4])
if shim.is_loaded():
    shim.network(sys.argv[1], shim.Network.ONE_MACHINE)
def stop(*_, **__):
    print(" ".join(sorted(os.listdir(sys.argv[1]))), flush=True)
    sys.stdin.read()
atomic.publish = stop
flax.config.update("flax_use_orbax_checkpointing", sys.argv[2] == "orbax")
checkpoints.save_checkpoint(sys.argv[1], {"w": np.ones(100_000)}, int(sys.argv[3]), overwrite=True)
"""


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = [*UNSHARE, "hostname", "x"] if shutil.which("hostname") else [*UNSHARE, "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


needs_unshare = pytest.mark.skipif(not _can_unshare(), reason="new namespaces are not allowed here")


class Container:
    """A program in namespaces of its own that is in the middle of a save."""

    def __init__(self, folder: Path, format: str, step: int, host: str, environment: dict[str, str] | None = None):
        command = [*UNSHARE, sys.executable, "-c", WRITER, str(folder), format, str(step), host]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, env=environment)
        assert self.process.stdout is not None
        self.seen = self.process.stdout.readline().split()  # what was in the directory in the middle of its save

    def kill(self) -> None:
        """Kill -9, with the whole namespace."""
        self.process.kill()
        if not (self.process.stdout is None or self.process.stdout.closed):
            self.process.communicate()  # until the last process of the namespace is gone


@pytest.fixture
def begin() -> Iterator[Callable[..., Container]]:
    """Starts containers, and ends them after the test."""
    started: list[Container] = []

    def one(*arguments: object) -> Container:
        started.append(Container(*arguments))  # type: ignore[arg-type]
        return started[-1]

    yield one
    for container in started:
        container.kill()


def clean(*arguments: object) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(main, ["clean", *map(str, arguments)])


@needs_unshare
@pytest.mark.parametrize("format", ["msgpack", pytest.param("orbax", marks=pytest.mark.slow)])
def test_a_crash_loop_leaves_one_temporary(format: str, tmp_path: Path, begin: Callable[..., Container]) -> None:
    """Each start has another host name and pid namespace: it removes what the one before left; so does `clean`."""
    for number in range(3):
        container = begin(tmp_path, format, number, f"pod-{number}")
        assert len(container.seen) == 1, container.seen
        container.kill()
    assert len(names(tmp_path)) == 1
    assert "1 to remove" in clean(tmp_path, "--dry-run").stdout
    with use_flag(False):
        checkpoints.save_checkpoint(tmp_path, tree(), 9)
    assert names(tmp_path) == ["checkpoint_9"]


@pytest.mark.slow
@needs_unshare
@pytest.mark.skipif(bool(shim.why_not()), reason=shim.why_not() or "it is there")
@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_crash_loop_where_directories_take_no_lock(
    format: str, tmp_path: Path, begin: Callable[..., Container]
) -> None:
    """By the rules of NFS (network.c), `flock` refuses them: a file within is locked, while the writer is alive."""
    rules = {**os.environ, **shim.environment()}
    first = begin(tmp_path, format, 0, "pod-0", rules)
    second = begin(tmp_path, format, 1, "pod-1", rules)
    assert [len(first.seen), len(second.seen)] == [1, 2]  # the first one lives
    first.kill()
    second.kill()
    third = begin(tmp_path, format, 2, "pod-2", rules)
    assert len(third.seen) == 1
    third.kill()
    with use_flag(False):
        checkpoints.save_checkpoint(tmp_path, tree(), 9)
    assert names(tmp_path) == ["checkpoint_9"]


@pytest.mark.slow
@needs_unshare
@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_live_writer_keeps_its_temporary(format: str, tmp_path: Path, begin: Callable[..., Container]) -> None:
    """However old it looks, whoever looks, and whatever is forced."""
    (temporary,) = begin(tmp_path, format, 1, "pod").seen
    os.utime(tmp_path / temporary, (0, 0))
    with use_flag(False):
        checkpoints.save_checkpoint(tmp_path, tree(), 9)
    assert "0 to remove" in clean(tmp_path, "--yes", "--force").stdout
    other = begin(tmp_path, format, 2, "pod-2")
    assert temporary in other.seen
    other.kill()
    assert clean(tmp_path, "--yes").exit_code == 0
    assert names(tmp_path) == sorted([temporary, "checkpoint_9"])


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_every_save_holds_its_temporary(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has its name; afterwards nothing is locked, nor open."""
    seen, real = [], atomic.publish

    def publish(temporary: str, final: str, *, new: bool = False) -> None:
        seen.append((temporaries.parse(os.path.basename(temporary))["count"], writer_locks.is_held(temporary)))
        real(temporary, final, new=new)

    monkeypatch.setattr(atomic, "publish", publish)
    with use_flag(format == "orbax"):
        for overwrite in (False, True):
            checkpoints.save_checkpoint(tmp_path, tree(), 1, overwrite=overwrite)
    assert all(count.startswith("0") and is_held for count, is_held in seen)
    assert len(seen) == 2
    assert not writer_locks._held
    assert writer_locks.is_held(str(tmp_path / "checkpoint_1")) is False


def test_the_locks_of_a_failed_save_and_of_a_removal_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of them is known to be dead."""
    for flag in (False, True):
        with use_flag(flag):
            for step in range(4):
                checkpoints.save_checkpoint(tmp_path, tree(), step, keep=1, overwrite=True)
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", refusing(errno.EIO))
                with pytest.raises(errors.StorageError):
                    checkpoints.save_checkpoint(tmp_path, tree(), 9)
    assert not writer_locks._held
    assert names(tmp_path) == ["checkpoint_3"]


def refusing(number: int) -> Callable[[int], None]:
    """An fsync that fails for files, with this error."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    return fsync


def _refuse_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `flock` refuse directories, as on NFS and other network file systems."""
    real = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


_NFS = (("nfs4", ("rw", "local_lock=none")),)


@pytest.mark.parametrize("is_network", [False, True])
@pytest.mark.parametrize("keep", [1, 2])
def test_directories_that_take_no_lock(
    is_network: bool, keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save in Orbax's format locks a file in its temporary, which no checkpoint has; nor is anything else in it."""
    caplog.set_level(logging.WARNING, "flax_ckpt_compat")
    with use_flag(True):
        checkpoints.save_checkpoint(tmp_path, tree(), 0)
    expected = sorted(entry.name for entry in (tmp_path / "checkpoint_0").iterdir())
    _refuse_directories(monkeypatch)
    if is_network:
        monkeypatch.setattr(writer_locks, "_mounts_of", lambda _: _NFS)
    seen, real = [], atomic.publish

    def publish(temporary: str, final: str, *, new: bool = False) -> None:
        seen.append((writer_locks.is_held(temporary), writer_locks.LOCK_FILE in os.listdir(temporary)))
        real(temporary, final, new=new)

    monkeypatch.setattr(atomic, "publish", publish)
    with use_flag(True):
        for step, overwrite in ((1, False), (1, True), (2, False)):
            checkpoints.save_checkpoint(tmp_path, tree(), step, keep=keep, overwrite=overwrite)
        assert seen == [(True, True)] * 3
        kept = names(tmp_path)
        assert kept == ["checkpoint_1", "checkpoint_2"][-keep:]
        assert all(sorted(entry.name for entry in (tmp_path / name).iterdir()) == expected for name in kept)
        assert flax_ckpt_compat.verify(tmp_path / "checkpoint_2").ok
    assert not writer_locks._held
    assert not caplog.text


@pytest.mark.parametrize("to", ["orbax", "manager", "v1"])
def test_conversions_to_directories_that_take_no_lock(to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with the source, and gets the name, is the checkpoint alone; its entries are synced."""
    with use_flag(False):
        checkpoints.save_checkpoint(tmp_path / "source", tree(), 1)
    flax_ckpt_compat.convert(tmp_path / "source", tmp_path / "expected", to=to)
    _refuse_directories(monkeypatch)
    locked, hold = [], writer_locks.hold
    monkeypatch.setattr(writer_locks, "hold", lambda *a, **b: locked.append(hold(*a, **b)) or locked[-1])
    listed, fsync = dict[int, list[str]](), os.fsync

    def noting(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            listed[os.fstat(descriptor).st_ino] = sorted(os.listdir(descriptor))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    flax_ckpt_compat.convert(tmp_path / "source", tmp_path / "converted", to=to)
    assert locked == [True]
    assert not writer_locks._held
    found, expected = (
        sorted(str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*") if path.is_dir())
        for name in ("converted", "expected")
    )
    assert found == expected
    assert not [*tmp_path.rglob(writer_locks.LOCK_FILE)]
    folders = [path for path in (tmp_path / "converted").rglob("*") if path.is_dir()]
    assert all(sorted(os.listdir(path)) == listed[path.stat().st_ino] for path in folders)


def test_a_directory_of_a_dead_writer_that_took_no_lock_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in it tells: locked, it stays; not locked, it goes, on NFS after a while, as servers lose locks."""
    path = Path(
        atomic.temporary_path(str(tmp_path / "checkpoint_7"), locked=True).replace(temporaries.machine(), "0" * 12)
    )
    path.mkdir()
    file = path / writer_locks.LOCK_FILE
    _refuse_directories(monkeypatch)
    with file.open("wb") as lock:
        assert "0 to remove" in clean(tmp_path, "--yes").stdout  # its lock is yet to come
        (path / "data").write_bytes(b"x")
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert "0 to remove" in clean(tmp_path, "--yes", "--force").stdout
        with monkeypatch.context() as patch:
            patch.setattr(writer_locks, "_mounts_of", lambda _: _NFS)
            patch.setattr(temporaries, "_LOCK_LOST_SECONDS", -1.0)
            assert "0 to remove" in clean(tmp_path, "--yes", "--force").stdout
    with monkeypatch.context() as patch:
        patch.setattr(writer_locks, "_mounts_of", lambda _: _NFS)
        assert "0 to remove" in clean(tmp_path, "--dry-run").stdout
        patch.setattr(temporaries, "_LOCK_LOST_SECONDS", -1.0)
        assert "1 to remove" in clean(tmp_path, "--dry-run").stdout
    file.rename(tmp_path / "elsewhere")
    assert "0 to remove" in clean(tmp_path, "--dry-run").stdout  # between that file's removal and the new name
    (tmp_path / "elsewhere").rename(file)
    with use_flag(False):
        checkpoints.save_checkpoint(tmp_path, tree(), 9)
    assert names(tmp_path) == ["checkpoint_9"]


@pytest.mark.parametrize("flag", [False, True])
def test_no_locks_at_all(
    flag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing can be locked, a save says so, leaves no file for it, and only time tells of its temporary."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    seen, real = [], atomic.publish

    def publish(temporary: str, final: str, *, new: bool = False) -> None:
        held = writer_locks.is_held(temporary)
        seen.append((held, os.path.isdir(temporary) and writer_locks.LOCK_FILE in os.listdir(temporary)))
        real(temporary, final, new=new)

    monkeypatch.setattr(atomic, "publish", publish)
    with use_flag(flag):
        checkpoints.save_checkpoint(tmp_path, tree(), 1)
    assert seen == [(None, False)]
    assert "cannot be locked" in caplog.text


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[..., Path]:
    """Makes a temporary of a machine that is not this one; with a lock or without."""

    def make(*, locked: bool, content: bytes = b"x" * 1000) -> Path:
        path = atomic.temporary_path(str(tmp_path / "checkpoint_7"), locked=locked)
        found = Path(path.replace(temporaries.machine(), "0" * 12))
        found.write_bytes(content)
        return found

    return make


def test_what_only_time_protects(tmp_path: Path, foreign: Callable[..., Path]) -> None:
    """A writer without a lock may live elsewhere: `clean` says what --force would remove, and removes it then."""
    left = foreign(locked=False)
    told = clean(tmp_path, "--yes").stdout
    assert "0 to remove" in told
    assert "--force removes 1.00 kB more" in " ".join(told.split())
    assert left.exists()
    result = clean(tmp_path, "--yes", "--force")
    assert (result.exit_code, left.exists()) == (0, False)
    assert "Removed 1 of 1." in result.stdout


def test_an_empty_temporary_may_be_locked_at_once(tmp_path: Path, foreign: Callable[..., Path]) -> None:
    """A writer locks before it writes: what is empty may not be locked yet, and stays for a day."""
    left, written = foreign(locked=True, content=b""), foreign(locked=True)
    with use_flag(False):
        checkpoints.save_checkpoint(tmp_path, tree(), 9)
    assert (left.exists(), written.exists()) == (True, False)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_an_empty_temporary_that_is_locked(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Its writer is alive, also before the first byte; without the lock, nothing is known until there is one."""
    path = tmp_path / "temporary"
    make(path)
    assert writer_locks.is_held(str(path)) is None
    assert writer_locks.hold("tag", str(path))
    assert writer_locks.is_held(str(path)) is True
    writer_locks.release("tag")
    assert writer_locks.is_held(str(path)) is None


def test_exclusive_locks_are_for_writing_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS (flock(2)): a file is held by a descriptor that reads, and looked at by one that writes."""
    path, lock = tmp_path / "temporary", fcntl.flock
    path.write_bytes(b"x")

    def of_nfs(descriptor: int, operation: int) -> None:
        writes = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if operation & fcntl.LOCK_EX and not writes:
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    monkeypatch.setattr(writer_locks, "_mounts_of", lambda _: (("nfs4", ("rw", "local_lock=none")),))
    assert writer_locks.hold("tag", str(path))
    assert writer_locks.is_held(str(path)) is True
    writer_locks.release("tag")
    assert writer_locks.is_held(str(path)) is False


def test_locks_that_do_not_reach(tmp_path: Path, foreign: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system of other machines whose locks stay in one of them, time decides."""
    left = foreign(locked=True)
    monkeypatch.setattr(writer_locks, "_mounts_of", lambda _: (("fuse.sshfs", ("rw",)),))
    with use_flag(False):
        checkpoints.save_checkpoint(tmp_path, tree(), 9)
    assert left.exists()
    monkeypatch.setattr(writer_locks, "_mounts_of", lambda _: (("nfs4", ("rw", "local_lock=none")),))
    assert "0 to remove" in clean(tmp_path, "--dry-run").stdout  # its server may have lost the lock of a live one
    monkeypatch.setattr(temporaries, "_LOCK_LOST_SECONDS", -1.0)
    assert "1 to remove" in clean(tmp_path, "--dry-run").stdout


def test_old_temporaries_name_no_lock(tmp_path: Path, foreign: Callable[..., Path]) -> None:
    """Releases before this one take no lock: none means nothing of theirs."""
    left = foreign(locked=False)
    assert writer_locks.is_held(str(left)) is False
    with use_flag(True):
        checkpoints.save_checkpoint(tmp_path, tree(), 9)
    assert left.exists()


@pytest.mark.parametrize("flag", [False, True])
def test_a_full_disk_names_what_is_left(
    flag: bool, tmp_path: Path, foreign: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names, their bytes, and the command that removes them; not what this process writes."""
    left = foreign(locked=False)

    monkeypatch.setattr(os, "fsync", refusing(errno.ENOSPC))
    with use_flag(flag), pytest.raises(errors.StorageError) as caught:
        checkpoints.save_checkpoint(tmp_path, tree(), 9)
    assert f"left 1.00 kB in {tmp_path}: {left.name}. " in str(caught.value)
    assert "flax-ckpt clean --force" in str(caught.value)
    assert caught.value.errno == errno.ENOSPC


def test_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A worker that was forked in the middle of a save outlives its parent: the parent is dead nevertheless."""
    code = f"""
import os, signal
from flax_ckpt_compat._core.local import atomic, temporaries
path = atomic.temporary_path({str(tmp_path / "checkpoint_1")!r}, locked=True)
os.write(temporaries.create_file(path), b"x")
child = os.fork()
if not child:
    os.closerange(1, 3)
    signal.pause()
print(child, path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    child, path = process.stdout.split()
    try:
        assert writer_locks.is_held(path) is False
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_fork_releases_nothing_of_its_own(tmp_path: Path) -> None:
    """The numbers of the descriptors that its parent locks are those of its own files soon."""
    code = f"""
import os
from flax_ckpt_compat._core.local import writer_locks
path = {str(tmp_path / "temporary")!r}
open(path, "w").close()
assert writer_locks.hold("tag", path)
child = os.fork()
if not child:
    own = os.open(path, os.O_RDONLY)
    writer_locks.release("tag")
    os.fstat(own)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), writer_locks.is_held(path))
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.stdout.split() == ["0", "True"], process.stderr
