"""Trees that contain themselves: an error that says where, from saves, restores and plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.struct
import numpy as np
import pytest
from flax import nnx

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._trees import depth


@flax.struct.dataclass
class State:
    """A user's node."""

    params: Any


CALLS: dict[str, Callable[[Path, Any], Any]] = {
    "save_checkpoint": lambda run, tree: checkpoints.save_checkpoint(run, tree, 2),
    "save": lambda run, tree: flax_ckpt_compat.save(run, tree, step=2, format="orbax"),
    "restore_checkpoint": lambda run, tree: checkpoints.restore_checkpoint(run, tree),
    "restore": lambda run, tree: flax_ckpt_compat.restore(run, tree),
    "plan_restore": lambda run, tree: flax_ckpt_compat.plan_restore(run, tree),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_tree_that_contains_itself(call: str, tmp_path: Path) -> None:
    """It is no tree; nothing is written."""
    checkpoints.save_checkpoint(tmp_path, {"a": {"params": {"b": [np.ones(2)]}}}, 1)
    inner: dict[str, Any] = {"b": [np.ones(2)]}
    tree = {"a": State(inner)}
    inner["b"].append(inner)
    with pytest.raises(errors.DepthError, match=r"contains itself .*: a/params/b/1 is the same object as a/params"):
        CALLS[call](tmp_path, tree)
    assert checkpoints.available_steps(tmp_path) == [1]


@pytest.mark.slow
def test_what_occurs_twice_is_no_cycle() -> None:
    """Nor is a deep tree one."""
    shared = [1, {"x": 2}]
    assert depth._cycle({"a": shared, "b": shared, "c": (shared, dataclasses.replace(State(shared)))}) is None
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert depth._cycle(deep) is None
    ring: list[Any] = []
    ring.append((ring,))
    assert depth._cycle(ring) == (("0", "0"), ())


class Ring(nnx.Module):
    """A module that holds itself."""

    def __init__(self) -> None:
        self.w = nnx.Param(np.ones(2))
        self.me = self


@pytest.mark.skipif(not hasattr(nnx, "Pytree"), reason="modules of this Flax are no trees")
@pytest.mark.parametrize("call", ["save_checkpoint", "save"])
def test_a_module_that_contains_itself(call: str, tmp_path: Path) -> None:
    """The error names the way out, which works."""
    with pytest.raises(errors.DepthError, match=r"a/me is the same object as a\..* save nnx\.state\(module\)"):
        CALLS[call](tmp_path, {"a": Ring()})
    CALLS[call](tmp_path, {"a": nnx.state(Ring())})
    assert checkpoints.available_steps(tmp_path) == [2]
