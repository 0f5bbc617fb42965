"""Trees that are nested deeply: what saves, restores, from a deeper stack too; beyond that both say so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, errors, open_checkpoint, plan_restore, restore, save
from flax_ckpt_compat._trees import depth as depth_module


def nested(levels: int) -> Any:
    """A leaf below so many dicts."""
    tree: Any = np.arange(3)
    for _ in range(levels):
        tree = {"k": tree}
    return tree


def deeper(calls: int, function: Callable[[], Any]) -> Any:
    """Calls a function from below so many other calls."""
    return deeper(calls - 1, function) if calls else function()


@contextmanager
def recursion_limit(limit: int) -> Iterator[None]:
    """Another recursion limit inside the block."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def deepest(folder: Path) -> int:
    """The most levels that can be saved here."""
    low, high = 50, 1000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            checkpoints.save_checkpoint(folder, nested(middle), middle)
            low = middle
        except errors.DepthError:
            high = middle
    return low


RESTORES: dict[str, Callable[[Path, Any], Any]] = {
    "restore_checkpoint": lambda path, tree: checkpoints.restore_checkpoint(path, tree),
    "without a target": lambda path, _: checkpoints.restore_checkpoint(path, None),
    "restore": restore,
    "plan_restore": lambda path, tree: str(plan_restore(path, tree)),
    "open_checkpoint": lambda path, _: open_checkpoint(path).read(),
    "kept leaves": lambda path, tree: checkpoints.restore_checkpoint(path, tree, orbax_transforms={}),
}


def test_what_saves_restores(flag: bool, tmp_path: Path) -> None:
    """The deepest tree that saves restores in every way, called from fifteen calls further down."""
    most = deepest(tmp_path)
    assert most > 250  # with the calls of pytest around it
    for function in RESTORES.values():
        assert deeper(15, lambda function=function: function(tmp_path, nested(most))) is not None
    found = checkpoints.restore_checkpoint(tmp_path, nested(most))
    for _ in range(most):
        found = found["k"]
    np.testing.assert_array_equal(found, np.arange(3))


@pytest.mark.parametrize("levels", [400, 2000])
@pytest.mark.parametrize("background", [False, True])
def test_beyond_that_nothing_is_written(flag: bool, tmp_path: Path, levels: int, background: bool) -> None:
    """The error says how to go on; the checkpoint before stays."""
    checkpoints.save_checkpoint(tmp_path, nested(3), 1)
    manager = checkpoints.AsyncManager() if background else None
    for call in (
        lambda: checkpoints.save_checkpoint(tmp_path, nested(levels), 2, async_manager=manager),
        lambda: save(tmp_path / "x", nested(levels), async_manager=manager),
    ):
        with pytest.raises(errors.DepthError, match=r"sys\.setrecursionlimit"):
            call()
    assert checkpoints.available_steps(tmp_path) == [1] and not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", RESTORES)
def test_a_restore_that_is_called_too_far_down_says_so(flag: bool, tmp_path: Path, name: str) -> None:
    """What was saved with a higher limit needs it again."""
    tree = nested(450)
    with recursion_limit(5000):
        checkpoints.save_checkpoint(tmp_path, tree, 1)
        assert RESTORES[name](tmp_path, tree) is not None
    with recursion_limit(300), pytest.raises(errors.DepthError, match="recursion limit"):
        RESTORES[name](tmp_path, tree)


def test_a_read_that_is_called_too_far_down_says_so(flag: bool, tmp_path: Path) -> None:
    """Of a checkpoint that was opened where there was room."""
    with recursion_limit(5000):
        checkpoints.save_checkpoint(tmp_path, nested(450), 1)
        opened = open_checkpoint(tmp_path)
    with opened, recursion_limit(300), pytest.raises(errors.DepthError, match="recursion limit"):
        opened.read()


def test_shallow_trees_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are counted for deep trees alone."""
    monkeypatch.setattr(depth_module, "_calls", lambda: pytest.fail("counted"))
    checkpoints.save_checkpoint(tmp_path, nested(20), 1)
