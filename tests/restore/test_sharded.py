"""Sharded state on one machine: eight forced host devices, in a process of their own that runs all cases."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.interpreters import devices, run_python

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "sharded_cases.py"
CASES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
# It compiles the steps of whole models for eight devices.
SLOW = "real_states"
NAMES = [pytest.param(name, marks=pytest.mark.slow if name == SLOW else ()) for name in CASES]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Case → traceback, empty if it passed."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked = [item.callspec.params["name"] for item in items]
    program = "import sys; from tests.support import sharded_cases; sharded_cases.main(*sys.argv[1:])"
    out, _ = run_python(program, tmp_path_factory.mktemp("sharded"), *asked, timeout=300, **devices(8))
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    return dict(lines)


@pytest.mark.parametrize("name", NAMES)
def test_sharded(outcomes: dict[str, str], name: str) -> None:
    """What the case of this name in the script says."""
    if outcomes[name].startswith("skipped: "):
        pytest.skip(outcomes[name])
    assert outcomes[name] == ""
