"""This version of the library beside one without checksums, in one directory, in turns and at the same time."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import flax_ckpt_compat
from flax_ckpt_compat import errors
from tests.both_formats import version_worker as today
from tests.support.interpreters import ROOT

# This file came with checksums.
_FIRST_FILE = "flax_ckpt_compat/_core/checksums.py"
pytestmark = pytest.mark.slow  # what old versions wrote, tests/data has for the default suite
FORMATS = pytest.mark.parametrize("orbax", [False, True], ids=["msgpack", "orbax"])


class OldVersion:
    """The functions of `version_worker`, by a process with the older version."""

    def __init__(self, source: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, version_worker_path()],
            env=os.environ | {"PYTHONPATH": str(source), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert str(source) in self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Call a function there; return its result or error."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = self._answer()
        return found

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            found = self.ask(name, **arguments)
            assert "error" not in found, found["text"]
            return found["result"]

        return call


def version_worker_path() -> str:
    """The file of the program."""
    assert today.__file__ is not None
    return today.__file__


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OldVersion]:
    """The version before checksums came; skips where there is no history of the repository."""
    source = tmp_path_factory.mktemp("old")
    try:
        found = _git("log", "--diff-filter=A", "--format=%H", "--", _FIRST_FILE).decode().split()
        archive = _git("archive", f"{found[-1]}~1", "flax_ckpt_compat", "legacy", "orbax_backend")
    except (OSError, subprocess.CalledProcessError, IndexError):
        pytest.skip("the history of the repository does not have the version before checksums")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(source, filter="data")
    started = OldVersion(source)
    with started.process:  # closes its input, at which it ends
        yield started


def state_of(path: str) -> str:
    """What `verify` says of a checkpoint."""
    (found,) = flax_ckpt_compat.verify(path).checkpoints
    return found.state


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True).stdout


@FORMATS
def test_in_turns(orbax: bool, old: OldVersion, tmp_path: Path) -> None:
    """Each reads what either saved last, overwrites it, and evicts it, with checksums verified."""
    root = str(tmp_path / "run")
    today.save(root, 1, orbax, step=1)
    old.save(root=root, number=2, orbax=orbax, step=1, overwrite=True)
    assert [today.restore(root), old.restore(root=root)] == [2, 2]
    assert state_of(f"{root}/checkpoint_1") == "unverified"
    today.save(root, 3, orbax, step=1, overwrite=True)
    assert [today.restore(root), old.restore(root=root)] == [3, 3]
    assert state_of(f"{root}/checkpoint_1") == "ok"
    old.save(root=root, number=4, orbax=orbax, step=2)
    today.save(root, 5, orbax, step=3, keep=2)
    assert today.steps(root) == old.steps(root=root) == [2, 3]
    old.save(root=root, number=6, orbax=orbax, step=4, keep=2)
    assert today.steps(root) == old.steps(root=root) == [3, 4]
    for step, number in ((3, 5), (4, 6)):
        assert today.restore(root, step) == old.restore(root=root, step=step) == number


@FORMATS
def test_copied_over(orbax: bool, old: OldVersion, tmp_path: Path) -> None:
    """Old files that are copied over those of a checkpoint with checksums, which stay, restore as the old ones."""
    root = str(tmp_path / "run")
    today.save(root, 1, orbax, step=1)
    old.save(root=str(tmp_path / "old"), number=2, orbax=orbax, step=1)
    source, target = tmp_path / "old/checkpoint_1", tmp_path / "run/checkpoint_1"
    if orbax:
        shutil.copytree(source, target, dirs_exist_ok=True)
        assert (target / "flax_ckpt_compat.checksums").exists()
    else:
        target.write_bytes(source.read_bytes())  # which keeps the attributes of the file
    assert [today.restore(root), old.restore(root=root)] == [2, 2]


@FORMATS
def test_at_the_same_time(orbax: bool, old: OldVersion, tmp_path: Path) -> None:
    """Both save steps of one run, and evict: what was saved last is the latest, and all that is there is whole."""
    root, saved = str(tmp_path / "run"), dict[int, int]()

    def save_old() -> None:
        for step in range(0, 24, 2):
            found = old.ask("save", root=root, number=100 + step, orbax=orbax, step=step, keep=3)
            if "error" in found:
                assert found["error"] == "InvalidCheckpointError", found["text"]  # the other was faster
            else:
                saved[step] = 100 + step

    with ThreadPoolExecutor(1) as pool:  # waits, also if this fails: the next test asks the same process
        done = pool.submit(save_old)
        for step in range(1, 24, 2):
            try:
                today.save(root, 100 + step, orbax, step=step, keep=3)
                saved[step] = 100 + step
            except errors.InvalidCheckpointError:
                pass
            assert today.restore(root) >= 100 + step
    done.result()
    last = max(saved)
    assert today.restore(root) == old.restore(root=root) == saved[last]
    for step in today.steps(root):
        assert today.restore(root, step) == old.restore(root=root, step=step) == 100 + step
    assert len(today.steps(root)) <= 3 or orbax
    assert not [name for name in os.listdir(root) if not name.startswith("checkpoint_")]
