"""Runs Flax's own tests of ``flax.training.checkpoints`` on our functions: ``python -m tests.flax_own.run``.

The tests come from the source distribution of the installed Flax and are never kept.
"""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.flax_own.plugin import COUNTS_VARIABLE

ROOT = Path(__file__).parents[2]
TEST_FILE = "tests/checkpoints_test.py"


class DownloadError(Exception):
    """The source distribution cannot be had, most likely because this machine is offline."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run of Flax's tests showed.

    Attributes:
        code: pytest's exit code.
        output: all that pytest printed.
        calls: how many calls reached ``ours.NAME`` and ``flax.NAME``.
        deselected: the cases that were left out.
    """

    code: int
    output: str
    calls: dict[str, int]
    deselected: list[str]

    @property
    def closing_line(self) -> str:
        """Pytest's last line: how many passed, failed and were left out."""
        return self.output.rstrip().rpartition("\n")[2].strip("= ")


def download(folder: Path) -> Path:
    """Downloads the source distribution of the installed Flax.

    Args:
        folder: where to put it.

    Returns:
        The archive.

    Raises:
        DownloadError: pip did not succeed.
    """
    wanted = f"flax=={importlib.metadata.version('flax')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-binary", ":all:", "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    archives = list(folder.glob("flax-*.tar.gz"))
    if done.returncode or not archives:
        raise DownloadError(f"pip cannot download the source of {wanted}: {done.stderr.strip()[-500:]}")
    return archives[0]


def extract_tests(archive: Path, folder: Path) -> Path:
    """Takes the one test file out of Flax's source distribution.

    Args:
        archive: the ``.tar.gz``.
        folder: where to put the file.

    Returns:
        The test file.
    """
    with tarfile.open(archive) as tar:
        (name,) = [name for name in tar.getnames() if name.partition("/")[2] == TEST_FILE]
        member = tar.extractfile(name)
        assert member is not None, f"{name} in {archive.name} is not a file"
        found = folder / "checkpoints_test.py"
        found.write_bytes(member.read())
    return found


def run_tests(test_file: Path) -> Outcome:
    """Runs the test file in a fresh process with our functions installed.

    Args:
        test_file: Flax's tests; its folder also takes the counts.

    Returns:
        What came of it.
    """
    counts = test_file.with_name("counts.json")
    # Neither our pytest settings nor Flax's: the file is run as it stands.
    command = [sys.executable, "-m", "pytest", "-p", "tests.flax_own.plugin", "-p", "no:cacheprovider"]
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
    found = json.loads(counts.read_text(encoding="utf-8")) if counts.exists() else {"calls": {}, "deselected": []}
    return Outcome(done.returncode, done.stdout, found["calls"], found["deselected"])


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
    print(f"left out: {', '.join(outcome.deselected)}")
    print(f"calls: {', '.join(f'{name} {count}' for name, count in sorted(outcome.calls.items()))}")
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
