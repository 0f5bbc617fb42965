"""Two prefixes of which one is the beginning of the other, in one directory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from tests.support.logs import warnings_logged
from tests.support.saves import names, tree


@pytest.mark.parametrize(("short", "long"), [("v", "v2"), ("", "7"), ("run-1", "run-1.5"), ("a", "a-"), ("m", "m1e")])
def test_neither_evicts_nor_blocks_the_other(flag: bool, tmp_path: Path, short: str, long: str) -> None:
    """Whatever their order, each keeps its own newest, although the names of one read as steps of the other."""
    with warnings_logged() as warnings:
        for step in (3, 4, 5):
            ours.save_checkpoint(tmp_path, tree(step), step, prefix=long)
            ours.save_checkpoint(tmp_path, tree(-step), step, prefix=short)
    assert names(tmp_path) == sorted([f"{long}5", f"{short}5"])
    assert ours.restore_checkpoint(tmp_path, None, 5, prefix=long)["n"] == 5
    assert ours.restore_checkpoint(tmp_path, None, 5, prefix=short)["n"] == -5
    (warning,) = warnings
    assert f"The prefixes {short!r} and {long!r}" in warning and str(tmp_path) in warning


def test_overwrite_removes_only_its_own(flag: bool, tmp_path: Path) -> None:
    """What is newer under the other prefix stays, and an older step of one's own is refused as ever."""
    ours.save_checkpoint(tmp_path, tree(3), 3, prefix="v2")
    for step in (6, 7):
        ours.save_checkpoint(tmp_path, tree(step), step, prefix="v", keep=0)
    with pytest.raises(errors.InvalidCheckpointError, match="v7 is newer"):
        ours.save_checkpoint(tmp_path, tree(5), 5, prefix="v")
    ours.save_checkpoint(tmp_path, tree(5), 5, prefix="v", overwrite=True)
    assert names(tmp_path) == ["v23", "v5"]


def test_prefixes_that_share_no_name_are_not_mentioned(flag: bool, tmp_path: Path) -> None:
    """Nor are the same prefixes in two directories."""
    with warnings_logged() as warnings:
        for prefix in ("ckpt_", "ckpt_best_", "ckpt"):
            ours.save_checkpoint(tmp_path, tree(1), 1, prefix=prefix)
        ours.save_checkpoint(tmp_path / "a", tree(1), 1, prefix="v")
        ours.save_checkpoint(tmp_path / "b", tree(1), 1, prefix="v2")
    assert not warnings


def test_in_the_background(flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Retention of a background save knows what was saved meanwhile."""
    caplog.set_level(logging.WARNING)
    managers = ours.AsyncManager(), ours.AsyncManager()
    for step in (3, 4):
        for manager, prefix in zip(managers, ("v", "v2"), strict=True):
            ours.save_checkpoint(tmp_path, tree(step), step, prefix=prefix, async_manager=manager)
    for manager in managers:
        manager.wait_previous_save()
    assert names(tmp_path) == ["v24", "v4"]
    assert caplog.text.count("The prefixes") == 1


def test_a_path_is_a_prefix(flag: bool, tmp_path: Path) -> None:
    """As in Flax, which formats it, a prefix may be a path object; anything else is a TypeError before it is saved."""
    prefix: Any = Path("run") / "a_"
    (tmp_path / "run").mkdir()
    assert ours.save_checkpoint(tmp_path, tree(3), 3, prefix=prefix) == str(tmp_path / "run" / "a_3")
    assert ours.latest_checkpoint(tmp_path, prefix) == str(tmp_path / "run" / "a_3")
    assert ours.available_steps(tmp_path, prefix) == [3]
    assert ours.restore_checkpoint(tmp_path, None, prefix=prefix)["n"] == 3
    nothing: Any = None
    with pytest.raises(TypeError, match="a prefix is text or a path object"):
        ours.save_checkpoint(tmp_path, tree(4), 4, prefix=nothing)
