"""A look at a directory that fails says nothing of what is there: no target, no older step, no word of damage, no loss.

`python -m tests.reliability --only reads` does the same below Python, beside real Flax."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat.errors import StorageError
from tests.support.saves import set_aside, use_flag

_CALLS = ("stat", "lstat", "listdir", "open")
_TARGET = {"a": np.zeros(3)}


class _Failing:
    """Counts the calls of `os` below a directory, and lets the n-th fail."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, at: int = 0, number: int = errno.EIO):
        self._folder, self._at, self._number, self.calls = str(folder), at, number, 0
        for name in _CALLS:
            patch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **options: Any) -> Any:
            if str(path).startswith(self._folder):
                self.calls += 1
                if self.calls == self._at:
                    raise OSError(self._number, os.strerror(self._number), str(path))
            return real(path, *rest, **options)

        return call


def _restore(folder: Path) -> float:
    return float(checkpoints.restore_checkpoint(folder, _TARGET)["a"][0])


def _latest(folder: Path) -> float:
    return float(str(checkpoints.latest_checkpoint(folder)).rpartition("_")[2])


@pytest.mark.parametrize("look", [_restore, _latest])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN], ids=errno.errorcode.get)
@pytest.mark.parametrize("flag", [False, True], ids=["msgpack", "orbax format"])
def test_each_look_fails_once(flag, number, look, tmp_path):
    """The latest step, or a StorageError: a stale name is looked up again, and a dead mount is no empty directory."""
    with use_flag(flag):
        for step in (1, 2, 3):
            checkpoints.save_checkpoint(tmp_path, {"a": np.full(3, float(step))}, step, keep=3)
        with pytest.MonkeyPatch.context() as patch:
            calls = _Failing(tmp_path, patch)
            assert look(tmp_path) == 3
        assert calls.calls > 2
        for at in range(1, calls.calls + 1):
            with pytest.MonkeyPatch.context() as patch:
                _Failing(tmp_path, patch, at, number)
                try:
                    assert look(tmp_path) == 3, at
                except StorageError as error:
                    assert error.errno == number, (at, error)


def _values(folder: Path) -> dict[float, float]:
    """Return step → value of all that is there."""
    return {
        float(step): float(checkpoints.restore_checkpoint(folder, _TARGET, step)["a"][0])
        for step in checkpoints.available_steps(folder)
    }


@pytest.mark.parametrize(
    ("number", "flag"),
    [
        (errno.ENOTCONN, False),
        pytest.param(errno.EIO, True, marks=pytest.mark.slow),
        pytest.param(errno.EIO, False, marks=pytest.mark.slow),
        pytest.param(errno.ENOTCONN, True, marks=pytest.mark.slow),
    ],
)
def test_each_look_of_a_save_fails_once(flag, number, tmp_path):
    """The save succeeds, or raises StorageError; then each step has its old value or the new one."""

    def save(at: int) -> tuple[int, StorageError | None, dict[float, float]]:
        folder = tmp_path / str(at)
        for step in (1, 2, 3):
            checkpoints.save_checkpoint(folder, {"a": np.full(3, float(step))}, step, keep=3)
        with pytest.MonkeyPatch.context() as patch:
            calls, failure = _Failing(folder, patch, at, number), None
            try:
                checkpoints.save_checkpoint(folder, {"a": np.full(3, 20.0)}, 2, keep=1, overwrite=True)
            except StorageError as error:
                failure = error
        return calls.calls, failure, _values(folder)

    with use_flag(flag):
        count, failure, values = save(0)
        assert failure is None and values == {2: 20} and count > 5
        for at in range(1, count + 1):
            _, failure, values = save(at)
            if failure is None:
                assert values == {2: 20}, at
            elif 20 not in values.values():
                assert values == {1: 1, 2: 2, 3: 3}, (at, failure)
            else:  # it failed to remove others
                assert values.items() <= {1: 1, 2: 20, 3: 3}.items(), (at, failure)


@pytest.mark.parametrize("named", ["step", "path"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN], ids=errno.errorcode.get)
def test_a_search_for_what_was_set_aside_fails(named, number, tmp_path):
    """A named checkpoint that a dead writer set aside is put back: no target where its directory is not listed."""
    with use_flag(False):
        path = Path(checkpoints.save_checkpoint(tmp_path, {"a": np.full(3, 1.0)}, 1))
    set_aside(path)

    def fail(folder: Any = ".") -> Any:
        raise OSError(number, os.strerror(number), str(folder))

    where, step = (path, None) if named == "path" else (tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "listdir", fail)
        with pytest.raises(StorageError) as raised:
            checkpoints.restore_checkpoint(where, _TARGET, step)
        assert raised.value.errno == number
    assert checkpoints.restore_checkpoint(where, _TARGET, step)["a"][0] == 1
