"""Storms of Ctrl-C: many interrupts during saves of both formats, evictions, background saves and conversions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import flax
import pytest

from flax_ckpt_compat import checkpoints
from tests.save.interrupt_storm import FORMATS, KINDS, Run
from tests.support import interrupting
from tests.support.interpreters import ROOT
from tests.support.saves import use_flag


def _storm(folder: Path, seed: int, rounds: int) -> dict[str, int]:
    """Run a storm in a process of its own, which has to end; return its counts."""
    command = [sys.executable, "-m", "tests.save.interrupt_storm", str(folder), str(seed), str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60 + 3 * rounds)
    assert ended.returncode == 0, f"seed {seed}, {rounds} rounds:\n{ended.stdout}\n{ended.stderr[-4000:]}"
    for format, flag in FORMATS.items():  # what an interrupt left locked is free now, and the next save removes it
        with use_flag(flag):
            checkpoints.save_checkpoint(folder / format, {"a": 1}, 10**6)
        assert not [name for name in os.listdir(folder / format) if name.startswith(".")]
    counts: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return counts


@pytest.mark.slow
def test_a_storm(tmp_path: Path) -> None:
    """After each interrupt the last acknowledged checkpoint restores; the next process leaves nothing hidden."""
    counts = _storm(tmp_path, 1, 20)
    assert counts["interrupts"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
def test_long_storms(seed: int, tmp_path: Path) -> None:
    """The same, of other seeds, and of all kinds of calls."""
    counts = _storm(tmp_path, seed, 300)
    assert {key.rsplit(" ", 1)[0] for key in counts if key != "interrupts"} == {
        f"{format} {kind}" for format in FORMATS for kind in KINDS
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind == "keep" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("every", [601, pytest.param(53, marks=pytest.mark.slow)], ids=["some places", "many places"])
def test_ctrl_c_comes_out_of_each_call(format: str, kind: str, every: int, tmp_path: Path) -> None:
    """Wherever it comes, in Python's own modules and in jax too, a call raises KeyboardInterrupt, and saves work on.

    An eviction raised CleanupError for a descriptor that `shutil.rmtree` had closed twice."""
    flax.config.update("flax_use_orbax_checkpointing", FORMATS[format])
    run, is_place, at = Run(tmp_path, format), True, 1
    for first in ("keep", kind, kind):  # which import what they need
        KINDS[first](run)()
    while is_place:
        is_place = interrupting.ctrl_c(KINDS[kind](run), at)
        at += every
        run.look()
        run.save(keep=1)()
        for converted in tmp_path.glob("converted-*"):
            shutil.rmtree(converted)
    assert at > 1000
