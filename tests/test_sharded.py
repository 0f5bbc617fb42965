"""Sharded state on one machine: eight forced host devices, in a process of their own that runs all cases."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "support" / "sharded_cases.py"
NAMES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Case → traceback, empty if it passed."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("sharded"))],
        env={**os.environ, **flags, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(lines)


@pytest.mark.parametrize("name", NAMES)
def test_sharded(outcomes: dict[str, str], name: str) -> None:
    """What the case of this name in the script says."""
    if outcomes[name].startswith("skipped: "):
        pytest.skip(outcomes[name])
    assert outcomes[name] == ""
