"""The progress bars of commands that take long: on a terminal alone, and gone at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flax_ckpt_compat import save
from tests.guide import terminal

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("verify runs", "2 checkpoints: 2 ok"),
        ("diff runs/checkpoint_1 runs/checkpoint_2", "3 leaves identical"),
        ("convert runs to --to orbax", "2 converted"),
    ],
)
def test_bars(tmp_path: Path, line: str, printed: str) -> None:
    """A bar is drawn and removed, while results stay; there is none with --json, or where the output is piped."""
    tree = {"w": np.arange(9_000_000.0), "v": np.ones(3), "n": 1}
    for step in (1, 2):
        save(tmp_path / "runs", tree, step=step, format="msgpack")
    words = [sys.executable, "-m", "flax_ckpt_compat", *line.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("NO_COLOR", None)
    code, written = terminal.raw(words, str(tmp_path), environment)
    assert code == 0
    assert "━" in written
    stays = terminal.plain(terminal.shown(written))
    assert "━" not in stays
    assert printed in " ".join(stays.split())
    if "convert" in line:
        words[words.index("to")] = "to2"
    _, written = terminal.raw([*words, "--json"], str(tmp_path), environment)
    assert "━" not in written
    if "convert" in line:
        words[words.index("to2")] = "to3"
    piped = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert printed in piped.stdout
    assert "\x1b" not in piped.stdout + piped.stderr
