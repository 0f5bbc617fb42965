"""Examples in public docstrings run, as do the demo, and the guide's program for preemption."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from tests.support.saves import start_python, use_flag

MODULES = ("checkpoints", "config", "rules", "transforms")
# What the reference says every example begins with.
NAMES = {"np": np} | {name: getattr(flax_ckpt_compat, name) for name in flax_ckpt_compat.__all__}


def documented() -> dict[str, Any]:
    """Every public function and class, by its name in the package."""
    named = {name: NAMES[name] for name in flax_ckpt_compat.__all__}
    for module_name in MODULES:
        module = importlib.import_module(f"flax_ckpt_compat.{module_name}")
        named |= {f"{module_name}.{name}": getattr(module, name) for name in module.__all__}
    return {name: one for name, one in named.items() if inspect.isfunction(one) or inspect.isclass(one)}


EXAMPLES = {name: one for name, one in documented().items() if ">>> " in (one.__doc__ or "")}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("flag")
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example prints what it shows, with either value of Flax's flag."""
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    runner = doctest.DocTestRunner(optionflags=flags)
    text: list[str] = []
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__, dict(NAMES), name, None, None)
    runner.run(example, out=text.append)
    assert not runner.failures, "".join(text)


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_passes() -> None:
    """It is killed, goes on where it stopped, and every value is what real Flax and real Orbax read."""
    command = [sys.executable, str(ROOT / "migration_guide/demo.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  begins at step 200\n" in done.stdout and done.stdout.count("bit-identical") == 6


PAGE = ROOT / "migration_guide" / "how_to.md"
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
from flax_ckpt_compat import checkpoints

{function}

print("reached", train(sys.argv[1], 1_000_000), flush=True)
"""


def program() -> str:
    """The page's function, in a program of its own."""
    (function,) = re.findall(r"^(def train\(.*?^    return .*?\n)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return PROGRAM.format(function=function)


@pytest.mark.slow
def test_a_signal_of_the_scheduler(flag: bool, tmp_path: Path) -> None:
    """The program ends by itself, with code 0, having saved the step that it reached; the next one goes on there."""
    run, reached = tmp_path / "run", []
    for _ in range(2):
        before = checkpoints.latest_checkpoint(run)
        process = start_python(program(), run, FLAX_USE_ORBAX_CHECKPOINTING=str(flag).lower())
        try:
            end = time.monotonic() + 60
            while checkpoints.latest_checkpoint(run) == before and time.monotonic() < end:
                time.sleep(0.05)  # until it trains, and has its handler
            process.send_signal(signal.SIGTERM)
            printed, told = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0, told
        reached.append(int(printed.split()[1]))
        with use_flag(flag):
            state = checkpoints.restore_checkpoint(run, {"w": np.zeros(4), "step": 0})
        assert state["step"] == reached[-1] and (state["w"] == reached[-1]).all()
    assert 0 < reached[0] < reached[1]
