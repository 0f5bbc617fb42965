"""``progress=``: what the callback is told, from which threads, and what its own errors do."""

import errno
import functools
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from flax_ckpt_compat import Progress, checkpoints, config, errors, restore, rules, save
from flax_ckpt_compat._core import progress
from tests.support import terminal
from tests.support.layouts import assert_same

# Several parts of 16 MiB, and small arrays, which are inline in a database.
TREE = {
    "layer": {"kernel": np.arange(3_000_000.0), "bias": np.ones(3)},
    "table": np.ones((1000, 1000), np.int8),
    "n": 1,
}
NBYTES = 8 * 3_000_000 + 8 * 3 + 1000 * 1000
NAMES = {"layer/kernel", "layer/bias", "table", "layer.kernel"}  # those of Orbax have dots


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each count of bytes be a report, and terminals show bars."""
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def check(reports: list[Progress], doing: str, path: Path, total: int = NBYTES) -> None:
    """Assert what holds of the reports of a success: they never fall, and the last alone has all bytes."""
    assert {(one.doing, one.path, one.total) for one in reports} == {(doing, str(path), total)}
    done = [one.done for one in reports]
    assert done == sorted(done)
    assert [one.finished for one in reports] == [False] * (len(reports) - 1) + [True]
    assert done[-1] == total > done[-2] > 0
    assert reports[-1].name == ""
    assert {one.name for one in reports[:-1]} <= NAMES
    seconds = [one.seconds for one in reports]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("format", "compression"),
    [("msgpack", None), ("orbax", None), ("orbax", "zstd"), pytest.param("orbax", "crc32c", marks=pytest.mark.slow)],
)
def test_reports(tmp_path: Path, format: Any, compression: Any) -> None:
    """A save and a restore tell of all bytes of the arrays, with the names of leaves, and end with all of them.

    What is compressed counts by the size of the arrays."""
    reports: list[Progress] = []
    path = tmp_path / "c"
    save(path, TREE, format=format, compression=compression, progress=reports.append)
    check(reports, "save", path)
    reports.clear()
    assert_same(restore(path, progress=reports.append), TREE)
    check(reports, "restore", path)
    reports.clear()
    target = {"layer": {"weight": np.zeros(3_000_000, np.float32), "bias": np.ones(3)}}
    moved = [rules.rename("kernel", "weight")]
    restore(path, target, transforms=moved, dtype="target", progress=reports.append)
    check(reports, "restore", path, 8 * 3_000_000 + 8 * 3)


def test_the_setting(tmp_path: Path, flag: bool) -> None:
    """Flax's own functions report by the setting, background saves too; an argument takes precedence."""
    reports: list[Progress] = []
    manager = checkpoints.AsyncManager()
    with config.override(progress=reports.append):
        checkpoints.save_checkpoint(tmp_path, TREE, 1, async_manager=manager)
    manager.wait_previous_save()
    check(reports, "save", tmp_path / "checkpoint_1")
    reports.clear()
    with config.override(progress=reports.append):
        checkpoints.restore_checkpoint(tmp_path, TREE)
        check(reports, "restore", tmp_path / "checkpoint_1")
        reports.clear()
        restore(tmp_path, progress=lambda report: None)
        assert not reports
    with pytest.raises(errors.SettingError, match="or a function"):
        restore(tmp_path, progress="bars")  # type: ignore[arg-type]


def test_nothing_to_do(tmp_path: Path, format: Any) -> None:
    """Without arrays there is one report, of 0 bytes of 0; without a checkpoint there is none."""
    reports: list[Progress] = []
    save(tmp_path / "c", {"n": 1}, format=format, progress=reports.append)
    restore(tmp_path / "c", progress=reports.append)
    assert [(one.doing, one.done, one.total, one.finished) for one in reports] == [
        ("save", 0, 0, True),
        ("restore", 0, 0, True),
    ]
    reports.clear()
    assert restore(tmp_path / "nowhere", 5, must_exist=False, progress=reports.append) == 5
    assert not reports


def test_a_callback_that_fails_ends_no_work(tmp_path: Path, format: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A save, in the background too, and a restore go on; its error is logged, and it is not called again."""
    calls: list[Progress] = []

    def fail(report: Progress) -> None:
        calls.append(report)
        raise OSError(errno.ENOSPC, "no space for the log")

    manager = checkpoints.AsyncManager()
    save(tmp_path, TREE, step=1, format=format, progress=fail)
    save(tmp_path, TREE, step=2, format=format, async_manager=manager, progress=fail)
    manager.wait_previous_save()
    assert_same(restore(tmp_path, step=2, progress=fail), TREE)
    assert [one.doing for one in calls] == ["save", "save", "restore"]
    assert len([record for record in caplog.records if "progress callback of a" in record.getMessage()]) == 3


def test_what_a_signal_handler_raises_comes_out(tmp_path: Path) -> None:
    """The error of a handler, a partial of an object here, is no failure of the callback that it interrupts."""
    before = signal.signal(signal.SIGALRM, functools.partial(Mock(side_effect=TimeoutError), "all"))
    try:
        with pytest.raises(TimeoutError):
            save(tmp_path / "x", TREE, progress=lambda _: signal.raise_signal(signal.SIGALRM))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_failures_are_reported(tmp_path: Path, format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last report has the error that is raised; if the callback fails there too, the failure stays the error."""
    reports: list[Progress] = []
    with monkeypatch.context() as broken, pytest.raises(errors.StorageError) as raised:
        broken.setattr(os, "writev", full_disk)
        save(tmp_path / "c", TREE, format=format, progress=reports.append)
    assert reports[-1].error is raised.value
    assert not any(one.finished for one in reports)
    assert all(one.done < one.total for one in reports)

    def fail(report: Progress) -> None:
        raise KeyError(report.name)

    with monkeypatch.context() as broken, pytest.raises(errors.StorageError):
        broken.setattr(os, "writev", full_disk)
        save(tmp_path / "c", TREE, format=format, progress=fail)
    assert not os.listdir(tmp_path)


def test_one_thread_at_a_time(tmp_path: Path, format: Any) -> None:
    """Threads that read meanwhile do not wait for a slow callback, and do not call it either."""
    save(tmp_path / "c", TREE, format=format)
    turn = threading.Lock()

    def slow(_: Progress) -> None:
        assert turn.acquire(blocking=False)
        time.sleep(0.01)
        turn.release()

    restore(tmp_path / "c", progress=slow)


def test_a_few_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often bytes are counted, reports are so far apart, also after a callback that takes long."""
    now = [100.0]
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.25)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    reports: list[Progress] = []

    def take_a_second(report: Progress) -> None:
        reports.append(report)
        now[0] += 1

    meter = progress.Meter(take_a_second, "save")
    with meter.reporting():
        meter.begin("/c", lambda: 1000)
        for _ in range(10):
            now[0] += 0.125
            meter.add(50, ("a", "b"))
    # The first is due a quarter of a second after the beginning, the others as long after one has returned.
    assert [(one.done, one.name, one.seconds) for one in reports] == [
        (100, "a/b", 0.25),
        (200, "a/b", 1.5),
        (300, "a/b", 2.75),
        (400, "a/b", 4.0),
        (500, "a/b", 5.25),
        (1000, "", 6.25),
    ]


class Terminal(io.StringIO):
    """What a program takes for a terminal."""

    def isatty(self) -> bool:
        """Pretend."""
        return True


def test_the_bar_in_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn on standard error by each report, also of a failure, after which nothing is left of it."""
    first, second = Terminal(), Terminal()
    with monkeypatch.context() as patched, config.override(progress="bar"):
        patched.setattr(sys, "stderr", first)
        checkpoints.save_checkpoint(tmp_path, TREE, 1)
    assert "saving checkpoint_1" in first.getvalue() and "###" in first.getvalue()
    with monkeypatch.context() as patched, pytest.raises(errors.StorageError):
        patched.setattr(sys, "stderr", second)
        patched.setattr(os, "fsync", full_disk)
        save(tmp_path / "c", TREE, format="msgpack", progress="bar")
    for written in (first.getvalue(), second.getvalue()):
        assert written and terminal.plain(terminal.shown(written)).strip() == ""


class Broken(Terminal):
    """A terminal that is gone."""

    def write(self, _: str) -> int:
        """Fail."""
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def closed() -> io.StringIO:
    """Return a stream that takes nothing any more."""
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, object(), closed(), Broken()], ids=["none", "no stream", "closed", "broken"])
def test_no_work_fails_with_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    """Whatever standard error is, what is saved with a bar is restored with one, and again without."""
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        for step in (1, 2):
            save(tmp_path, TREE, step=step, progress="bar")
            found = restore(tmp_path, TREE, progress="bar")
    assert jax.tree.all(jax.tree.map(np.array_equal, found, TREE))


def test_a_terminal_without_a_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some say that they have no columns: nothing is drawn there, and nothing fails."""
    monkeypatch.setattr(Terminal, "fileno", lambda _: 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((0, 0)))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Terminal())
        save(tmp_path, TREE, step=1, progress="bar")
    assert "callback" not in caplog.text


def full_disk(*_: Any) -> int:
    """Fail as on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")
