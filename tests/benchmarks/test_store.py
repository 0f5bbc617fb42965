"""The benchmark of gs:// runs from end to end on tiny arrays, or says why not; what it measures is not judged here."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import store

ROOT = Path(__file__).parents[2]


def test_without_the_official_client(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what to install."""
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    store.main([])
    told = "skipped: google-cloud-storage is not installed: pip install google-cloud-storage\n"
    assert capsys.readouterr().out == told


@pytest.mark.slow
def test_every_system_is_timed(tmp_path: Path) -> None:
    """Each system has a row, what it restored was compared, and nothing is left behind."""
    if (why := store.why_not()) is not None:
        pytest.skip(why)
    command = [sys.executable, "-m", "tests.benchmarks.store", "--mib", "2", "--rounds", "1", "--workdir", tmp_path]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    assert all(name in out for name in ("ours, msgpack", "ours, orbax", *store._RAW))
    assert not list(tmp_path.iterdir())
