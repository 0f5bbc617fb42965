"""Conversions that are killed at any time, and resumed."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flax_ckpt_compat
from tests.support.interpreters import start_python
from tests.support.trees import fingerprint


def save_mixed(directory: Path, nbytes: int, count: int) -> None:
    """Saves checkpoints of so many bytes each in three runs and both formats, of leaves of all sizes and dtypes."""
    for n in range(count):
        rng = np.random.default_rng(n)
        tree = {
            "small": {str(i): rng.normal(size=(3, i)).astype(np.float32) for i in range(20)},
            "big": rng.integers(0, 255, nbytes // 2, np.uint8),
            "bf16": rng.normal(size=nbytes // 8).astype(ml_dtypes.bfloat16),
            "f64": [rng.normal(size=nbytes // 32), (n, None, "text")],
        }
        format: Any = "orbax" if n % 2 else "msgpack"
        flax_ckpt_compat.save(directory / f"run_{n % 3}", tree, step=n, format=format, overwrite=True)


# Converts, and kills this process before its n-th call into the system: source, destination, layout, n.
JOB = """
import os
import signal
import sys

import flax_ckpt_compat
from tests.support.interrupting import count_calls, interrupted

source, destination, to, at = sys.argv[1:]


def convert() -> None:
    flax_ckpt_compat.convert(source, destination, to, resume=True)


if at == "count":
    print(count_calls(convert))
else:
    interrupted(convert, int(at), lambda: os.kill(os.getpid(), signal.SIGKILL))
"""
COUNT = 20


def check(source: Path, destination: Path, *, complete: bool) -> None:
    """Whatever has a final name is a whole copy of its source."""
    for run in range(3):
        there = {found.step for found in flax_ckpt_compat.iter_checkpoints(destination / f"run_{run}")}
        steps = {found.step for found in flax_ckpt_compat.iter_checkpoints(source / f"run_{run}")}
        assert there == steps if complete else there <= steps
        for step in there:
            expected, found = (
                flax_ckpt_compat.restore(folder / f"run_{run}", step=step, structure="flax")
                for folder in (source, destination)
            )
            assert fingerprint(found) == fingerprint(expected)


@pytest.mark.parametrize("to", ["orbax", pytest.param("msgpack", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kills", "count"), [(2, 4), pytest.param(40, COUNT, marks=pytest.mark.slow)])
def test_killed_before_any_call_and_resumed(tmp_path: Path, to: str, kills: int, count: int) -> None:
    """After a kill -9 before any call into the system, results are whole, and the rest is converted later."""
    save_mixed(tmp_path / "src", 4096, count)
    counting = start_python(JOB, tmp_path / "src", tmp_path / "counted", to, "count")
    calls = int(counting.communicate()[0])
    assert calls > 100 * count
    for at in sorted(random.Random(kills).sample(range(1, calls // 2), kills), reverse=True):
        process = start_python(JOB, tmp_path / "src", tmp_path / "dst", to, at)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        check(tmp_path / "src", tmp_path / "dst", complete=False)
    done = flax_ckpt_compat.convert(tmp_path / "src", tmp_path / "dst", to, resume=True)  # type: ignore[arg-type]
    assert len(done) == count
    assert {result.status for result in done} <= {"kept", "converted"}
    check(tmp_path / "src", tmp_path / "dst", complete=True)
    assert [path.name for path in (tmp_path / "dst").rglob(".*")] == []  # nothing is left of the killed


COMMAND = """
import sys
from flax_ckpt_compat.cli import main
main(["convert", *sys.argv[1:], "--to", "orbax", "--resume", "--json"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_interrupted_by_the_user(tmp_path: Path, workers: int) -> None:
    """Ctrl-C ends it at once, with exit code 130; no temporaries are left."""
    save_mixed(tmp_path / "src", 20 << 20, 8)
    process = start_python(COMMAND, tmp_path / "src", tmp_path / "dst", "--workers", workers, fresh=True)
    while not (tmp_path / "dst").exists() or not any((tmp_path / "dst").rglob(".*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "Interrupted." and "of 8 converted; go on with --resume" in errors
    assert [path.name for path in (tmp_path / "dst").rglob(".*")] == []
    check(tmp_path / "src", tmp_path / "dst", complete=False)
