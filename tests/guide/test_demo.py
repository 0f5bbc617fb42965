"""The demo of the README: it ends well, and an ordinary training script runs in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_passes() -> None:
    """It is killed, goes on where it stopped, and every value is what real Flax and real Orbax read."""
    command = [sys.executable, str(ROOT / "migration_guide/demo.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  begins at step 200\n" in done.stdout and done.stdout.count("bit-identical") == 6


@pytest.mark.slow
def test_the_demo_says_no_when_a_bit_is_wrong(tmp_path: Path) -> None:
    """A checkpoint that our reader reads otherwise is told."""
    program = f"""
import sys, numpy as np
sys.path.insert(0, {str(ROOT / "migration_guide")!r})
import demo, flax_ckpt_compat
flax_ckpt_compat.checkpoints.save_checkpoint({str(tmp_path)!r}, {{"w": np.ones(2, np.float32)}}, 1)
assert demo.compare({str(tmp_path)!r})
flax_ckpt_compat.checkpoints.restore_checkpoint = lambda *_: {{"w": np.array([1, -1], np.float32)}}
assert not demo.compare({str(tmp_path)!r})
"""
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
