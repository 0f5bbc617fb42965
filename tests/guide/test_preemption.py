"""The guide's program for preemption: a scheduler's SIGTERM, sent from outside, loses no step that was trained."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flax_ckpt_compat import checkpoints
from tests.support.saves import use_flag

ROOT = Path(__file__).parents[2]
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
@pytest.mark.parametrize("flag", [False, True], ids=["msgpack", "orbax"])
def test_a_signal_of_the_scheduler(flag: bool, tmp_path: Path) -> None:
    """The program ends by itself, with code 0, having saved the step that it reached; the next one goes on there."""
    run, reached = tmp_path / "run", []
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "FLAX_USE_ORBAX_CHECKPOINTING": str(flag).lower()}
    for _ in range(2):
        before = checkpoints.latest_checkpoint(run)
        with subprocess.Popen(
            [sys.executable, "-c", program(), str(run)], env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                end = time.monotonic() + 60
                while checkpoints.latest_checkpoint(run) == before and time.monotonic() < end:
                    time.sleep(0.05)  # until it trains, and has its handler
                process.send_signal(signal.SIGTERM)
                printed, _ = process.communicate(timeout=60)
            finally:
                process.kill()
        assert process.returncode == 0, printed
        reached.append(int(printed.split()[1]))
        with use_flag(flag):
            state = checkpoints.restore_checkpoint(run, {"w": np.zeros(4), "step": 0})
        assert state["step"] == reached[-1] and (state["w"] == reached[-1]).all()
    assert 0 < reached[0] < reached[1]
