"""Ctrl-C in both formats' saves, evictions, background saves and conversions, at many places in turn."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import flax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.local import atomic
from tests.support import interrupting

FORMATS = {"msgpack": False, "orbax": True}


def tree_of(step: int) -> dict[str, Any]:
    """A tree whose every value tells the step."""
    arrays = {f"a{number:02}": np.full(200 * number, step + number, np.float32) for number in range(20)}
    return {"step": step, "params": arrays, "large": np.full(300_000, step, np.int16), "on_device": jnp.full(9, step)}


def check_whole(found: Any, step: int) -> None:
    """Raise AssertionError if a restored tree is not that of its step."""
    expected = tree_of(step)
    assert found["step"] == step, (found["step"], step)
    assert found["params"].keys() == expected["params"].keys()
    for name, array in {**expected["params"], "large": expected["large"], "on_device": expected["on_device"]}.items():
        got = found["params"].get(name, found.get(name))
        np.testing.assert_array_equal(got, array)


class Run:
    """One directory of one format, and what of it was acknowledged."""

    def __init__(self, folder: Path, format: str) -> None:
        self.folder, self.format, self.step, self.acknowledged = folder / format, format, 0, -1
        self.manager = checkpoints.AsyncManager()
        self.converted = 0

    def save(self, **options: Any) -> Callable[[], Any]:
        """A save of the next step, or of the last one with ``overwrite``."""
        self.step += not options.get("overwrite")
        tree, step = tree_of(self.step), self.step
        return lambda: checkpoints.save_checkpoint(self.folder, tree, step, **options)

    def save_in_background(self) -> Callable[[], Any]:
        """Several saves in the background, and the wait for them."""
        steps = range(self.step + 1, self.step + 4)
        self.step = steps[-1]

        def call() -> None:
            for step in steps:
                checkpoints.save_checkpoint(self.folder, tree_of(step), step, keep=2, async_manager=self.manager)
            self.manager.wait_previous_save()

        return call

    def convert(self) -> Callable[[], Any]:
        """A conversion of all steps to the other format."""
        self.converted += 1
        target = self.folder.parent / f"converted-{self.format}-{self.converted}"
        return lambda: flax_ckpt_compat.convert(
            self.folder, target, to="orbax" if self.format == "msgpack" else "msgpack"
        )

    def look(self) -> None:
        """Check all that is there, against what was acknowledged."""
        with contextlib.suppress(CancelledError):  # of a save whose start was interrupted
            self.manager.wait_previous_save()
        steps = checkpoints.available_steps(self.folder)
        assert max([int(step) for step in steps], default=-1) >= self.acknowledged, (steps, self.acknowledged)
        for step in steps:
            check_whole(checkpoints.restore_checkpoint(self.folder, None, step), int(step))
        for folder in self.folder.parent.glob(f"converted-{self.format}-*"):
            for step in checkpoints.available_steps(folder):
                check_whole(flax_ckpt_compat.restore(folder, step=step), int(step))


def test_ctrl_c_leaves_no_lock_of_a_directory(tmp_path: Path) -> None:
    """Wherever it comes while a directory is locked: each later save waited for five seconds."""

    def lock() -> None:
        with atomic.locked(str(tmp_path)):
            pass

    at = 1
    while interrupting.ctrl_c(lock, at):
        at += 1
        descriptor = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    assert at > 20


KINDS: dict[str, Callable[[Run], Callable[[], Any]]] = {
    "new": lambda run: run.save(keep=9),
    "keep": lambda run: run.save(keep=1),
    "overwrite": lambda run: run.save(overwrite=True),
    "background": lambda run: run.save_in_background(),
    "convert": lambda run: run.convert(),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_ctrl_c_comes_out_of_each_call(format: str, kind: str, tmp_path: Path) -> None:
    """Wherever it comes, in Python's own modules and in jax too, a call raises KeyboardInterrupt, and saves work on.

    An eviction raised CleanupError for a descriptor that `shutil.rmtree` had closed twice."""
    flax.config.update("flax_use_orbax_checkpointing", FORMATS[format])
    run, is_place, at = Run(tmp_path, format), True, 1
    for first in ("keep", kind, kind):  # which import what they need
        KINDS[first](run)()
    while is_place:
        is_place = interrupting.ctrl_c(KINDS[kind](run), at)
        at += 53
        run.look()
        run.save(keep=1)()
        for converted in tmp_path.glob("converted-*"):
            shutil.rmtree(converted)
    assert at > 1000
