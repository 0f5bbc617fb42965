"""A look at a step while another process replaces it: the latest stays the latest, and no step is left out.

`python -m tests.reliability --only overwrites --only "network overwrites"` does the same with real processes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.local import atomic
from tests.support.saves import use_flag

_TARGET = {"a": np.zeros(3)}


def _save(folder: Path, step: int, value: float) -> None:
    checkpoints.save_checkpoint(folder, {"a": np.full(3, value)}, step, keep=5, overwrite=True)


def _latest(folder: Path) -> Any:
    return str(checkpoints.latest_checkpoint(folder))[-1]


def _steps(folder: Path) -> Any:
    return checkpoints.available_steps(folder)[-1]


def _restored(folder: Path) -> Any:
    return checkpoints.restore_checkpoint(folder, _TARGET)["a"][0]


def _kept(folder: Path) -> Any:
    """Save a third step, which evicts the first."""
    checkpoints.save_checkpoint(folder, {"a": np.full(3, 3.0)}, 3, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_2", "checkpoint_3"]
    return 2


@pytest.fixture(params=[_latest, _steps, _restored, _kept])
def look(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Any:
    """Look at two steps; the second is the latest, and is whole at each moment, so that nothing is logged."""
    yield request.param
    assert not caplog.messages


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


@pytest.mark.parametrize("during", [_replaced, _missing])
@pytest.mark.parametrize("exchanges", [True, False])
def test_the_directory_is_replaced_while_it_is_listed(during, exchanges, look, tmp_path, monkeypatch):
    """It looked empty or absent, and the step before it was restored: 4 of 10,318 restores beside a writer."""
    if not exchanges:
        monkeypatch.setattr(atomic, "exchange", lambda *_: False)
    with use_flag(True):
        _save(tmp_path, 1, 1.0)
        _save(tmp_path, 2, 2.0)
        monkeypatch.setattr(os, "listdir", _once(tmp_path / "checkpoint_2", during))
        assert float(look(tmp_path)) == 2


@pytest.mark.parametrize("flag", [False, True], ids=["msgpack", "orbax format"])
def test_the_name_is_missing_in_a_listing_between_two_renames(flag, look, tmp_path, monkeypatch):
    """Where names cannot be exchanged, as on NFS; the writer has finished when the listing is read."""

    def listed(path: str) -> list[str]:
        aside = os.path.basename(atomic.temporary_path(os.path.join(path, "checkpoint_2"), "old"))
        return ["checkpoint_1", aside]

    with use_flag(flag):
        _save(tmp_path, 1, 1.0)
        _save(tmp_path, 2, 2.0)
        monkeypatch.setattr(os, "listdir", _once(tmp_path, listed))
        assert float(look(tmp_path)) == 2
