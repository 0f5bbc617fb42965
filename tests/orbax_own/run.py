"""Runs Orbax's own tests of its transformations on ours: ``python -m tests.orbax_own.run``.

The tests come from the last wheel of Orbax that had them, and are never kept; everything else that they import is of
the installed Orbax.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.flax_own.run import DownloadError, Outcome
from tests.orbax_own.plugin import COUNTS_VARIABLE

ROOT = Path(__file__).parents[2]
TEST_FILE = "orbax/checkpoint/transform_utils_test.py"
# Wheels from 0.11.4 on have no tests.
WHEEL = "orbax-checkpoint==0.11.3"


def download(folder: Path) -> Path:
    """Downloads the wheel that has the tests.

    Args:
        folder: where to put it.

    Returns:
        The wheel.

    Raises:
        DownloadError: pip did not succeed.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    wheels = list(folder.glob("orbax_checkpoint-*.whl"))
    if done.returncode or not wheels:
        raise DownloadError(f"pip cannot download {WHEEL}: {done.stderr.strip()[-500:]}")
    return wheels[0]


def extract_tests(wheel: Path, folder: Path) -> Path:
    """Takes the one test file out of Orbax's wheel.

    Args:
        wheel: the ``.whl``.
        folder: where to put the file.

    Returns:
        The test file.
    """
    found = folder / "transform_utils_test.py"
    with zipfile.ZipFile(wheel) as archive:
        found.write_bytes(archive.read(TEST_FILE))
    return found


def run_tests(test_file: Path) -> Outcome:
    """Runs the test file in a fresh process with our transformations in the place of Orbax's.

    Args:
        test_file: Orbax's tests; its folder also takes the counts.

    Returns:
        What came of it; the calls are counted by the name of the function.
    """
    counts = test_file.with_name("counts.json")
    command = [sys.executable, "-m", "pytest", "-p", "tests.orbax_own.plugin", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(test_file.parent), str(test_file)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command,
        cwd=test_file.parent,
        env={**os.environ, "PYTHONPATH": path, COUNTS_VARIABLE: str(counts)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    calls = json.loads(counts.read_text(encoding="utf-8")) if counts.exists() else {}
    return Outcome(done.returncode, done.stdout, calls, [])


def main() -> int:
    """Downloads, runs, prints pytest's closing line.

    Returns:
        Pytest's exit code.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcome = run_tests(extract_tests(download(folder), folder))
    if outcome.code:
        print(outcome.output)
    print(outcome.closing_line)
    print(f"calls: {', '.join(f'{name} {count}' for name, count in sorted(outcome.calls.items()))}")
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
