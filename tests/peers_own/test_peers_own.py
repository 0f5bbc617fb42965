"""Flax's own published tests of its checkpoints module, and Orbax's of its transformations, run on ours.

They come from the source of the installed Flax, and from the last wheel of Orbax that had them, and are never kept.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.peers_own.plugin import COUNTS, PEER
from tests.support.interpreters import ROOT

pytestmark = pytest.mark.slow  # downloads


def download(folder: Path, wanted: str, kind: str) -> Path:
    """The archive of a release; the test is skipped where this machine cannot have it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", f"--{kind}", ":all:", "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = [path for path in folder.iterdir() if path.suffix in (".gz", ".whl")]
    if done.returncode or not found:
        pytest.skip(f"pip cannot download {wanted}: {done.stderr.strip()[-500:]}")
    return found[0]


def run(peer: str, tests: bytes, folder: Path) -> tuple[str, dict[str, int], list[str]]:
    """Run a peer's tests in a fresh process: the last line, calls by function, and the cases that were left out."""
    file, counts = folder / f"{peer}_own_test.py", folder / "counts.json"
    file.write_bytes(tests)
    # Neither our pytest settings nor theirs: the file is run as it stands.
    command = [sys.executable, "-m", "pytest", "-p", "tests.peers_own.plugin", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(folder), str(file)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, PEER: peer, COUNTS: str(counts)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(counts.read_text(encoding="utf-8"))
    return done.stdout.rstrip().rpartition("\n")[2], found["calls"], found["deselected"]


def test_flax(tmp_path: Path) -> None:
    """Save, restore, listing and natural order; none but the two refusals is left out, and no call reached Flax's."""
    archive = download(tmp_path, f"flax=={importlib.metadata.version('flax')}", "no-binary")
    with tarfile.open(archive) as tar:
        (name,) = [name for name in tar.getnames() if name.partition("/")[2] == "tests/checkpoints_test.py"]
        member = tar.extractfile(name)
        assert member is not None
        last, calls, deselected = run("flax", member.read(), tmp_path)
    assert len(deselected) == 2 and "2 deselected" in last
    assert calls["ours.save_checkpoint"] > 20 and calls["ours.restore_checkpoint"] > 20
    assert not [name for name in calls if name.startswith("flax.")]


def test_orbax(tmp_path: Path) -> None:
    """All of them pass, none left out, on our functions and our class."""
    wheel = download(tmp_path, "orbax-checkpoint==0.11.3", "only-binary")  # from 0.11.4 on they have no tests
    with zipfile.ZipFile(wheel) as archive:
        last, calls, _ = run("orbax", archive.read("orbax/checkpoint/transform_utils_test.py"), tmp_path)
    assert "16 passed" in last and not any(word in last for word in ("skipped", "deselected", "failed"))
    assert calls["ours.apply_transformations"] > 12 and calls["ours.merge_trees"] == 3
    assert calls["ours.Transform"] >= 40
