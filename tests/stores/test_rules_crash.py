"""Saves that end in the middle: killed before the commit, at random moments, or by another writer."""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.location import location_of
from tests.support import s3
from tests.support.s3 import Bucket
from tests.support.saves import start_python, tree

SAVE = """
import sys
import flax
from flax_ckpt_compat import checkpoints
from tests.support.saves import tree
root, step, format = sys.argv[1:]
flax.config.update("flax_use_orbax_checkpointing", format == "orbax")
checkpoints.save_checkpoint(root, tree(100 + int(step)), int(step), keep=3, overwrite=True)
"""
CHANGES = ("PUT", "POST", "DELETE")


def from_change(number: int, fault: s3.Fault = "403") -> s3.Rule:
    """All requests from this change of the store on fail."""
    seen, ended = itertools.count(), []

    def rule(method: str, path: str) -> s3.Fault:
        if method in CHANGES and next(seen) >= number:
            ended.append(True)
        return fault if ended else ""

    return rule


def kill_at(bucket: Bucket, root: str, step: int, format: str, method: str, ending: str) -> None:
    """Saves in another process, which is killed when it asks for this; the request itself gets lost."""
    process = start_python(SAVE, root, step, format)

    def rule(asked: str, path: str) -> str:
        if asked == method and path.partition("?")[0].endswith(ending):
            process.kill()
            return "refuse"
        return ""

    with bucket.proxy.failing(rule):
        _, told = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, told


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["commit_success.txt", pytest.param("manifest.ocdbt", marks=pytest.mark.slow)])
def test_a_removal_that_ends_in_the_middle(bucket: Bucket, ending: str) -> None:
    """A checkpoint that is half removed never counts, and is removed wholly once its remover is surely dead."""
    root = f"{bucket.url}/run"
    for step in (0, 1, 2):
        flax_ckpt_compat.save(root, tree(step), step=step, format="orbax")
    kill_at(bucket, root, 3, "orbax", "DELETE", f"checkpoint_0/{ending}")  # keep=3
    assert ours.available_steps(root) == ([0, 1, 2, 3] if ending == "commit_success.txt" else [1, 2, 3])
    (mark,) = (key for key in bucket.keys("run/checkpoint_0/") if "_begun" in key)
    flax_ckpt_compat.save(root, tree(4), step=4, format="orbax", keep=3)
    assert (bucket.keys("run/checkpoint_0/") == []) == (ending == "commit_success.txt")  # else it may still be at work
    bucket.delete(mark)
    bucket.put(mark.replace(mark.split(".")[1], str(int(time.time()) - 25 * 3600)), b"")
    flax_ckpt_compat.save(root, tree(5), step=5, format="orbax", keep=3)
    assert ours.available_steps(root) == [3, 4, 5]


@pytest.mark.parametrize("commits", [False, True])
def test_an_overwrite_that_dies(commits: bool, bucket: Bucket) -> None:
    """After a day, its data goes from the folder that it was to replace; what it has committed stays."""
    root, ended = f"{bucket.url}/run", list[bool]()
    flax_ckpt_compat.save(root, tree(1), step=1, format="orbax")
    before = bucket.keys("run/")

    def rule(method: str, path: str) -> str:
        is_other = method in CHANGES and "/d/" not in path and "/_begun" not in path
        if (method == "DELETE" and "/_begun" in path) or (is_other and not commits):
            ended.append(True)
        return "403" if ended and method in CHANGES else ""

    with bucket.proxy.failing(rule), suppress(errors.StorageError):
        flax_ckpt_compat.save(root, tree(2), step=1, format="orbax", overwrite=True)
    (mark,) = (key for key in bucket.keys("run/") if "/_begun" in key)
    bucket.put(mark.replace(mark.split(".")[1], str(int(time.time()) - 25 * 3600)), bucket.get(mark))
    bucket.delete(mark)
    left = bucket.keys("run/")
    location_of(root).prepare_directory()
    assert bucket.keys("run/") == ([key for key in left if "/_begun" not in key] if commits else before)
    assert flax_ckpt_compat.restore(root)["n"] == 1 + commits


AT_EXIT = """
import sys
import flax
from flax_ckpt_compat import checkpoints
from tests.support.saves import tree
flax.config.update("flax_use_orbax_checkpointing", sys.argv[2] == "orbax")
manager = checkpoints.AsyncManager()
checkpoints.save_checkpoint(sys.argv[1], tree(1) | {str(n): n for n in range(50)}, 1, async_manager=manager)
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_program_that_ends_while_it_saves(bucket: Bucket, format: str) -> None:
    """A background save that is not waited for is committed before the interpreter has ended."""
    with bucket.proxy.failing(lambda method, path: "slow" if method == "PUT" else ""):
        process = start_python(AT_EXIT, f"{bucket.url}/run", format)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert flax_ckpt_compat.restore(f"{bucket.url}/run")["49"] == 49, told


def test_nothing_stays_on_the_local_disk(bucket: Bucket, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is uploaded is written to the temporary folder first, and removed from there, also after a failure."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for format in ("msgpack", "orbax"):
        flax_ckpt_compat.save(f"{bucket.url}/{format}", tree(1), format=format)
        with pytest.raises(errors.StorageError, match="no bucket"):
            flax_ckpt_compat.save(f"s3://not-there-{bucket.name}/{format}", tree(1), format=format)
    assert [files for _, _, files in os.walk(tmp_path) if files] == []
