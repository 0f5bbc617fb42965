"""``flax-ckpt clean``, ``verify`` and ``diff`` on an object store."""

import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat.cli import main
from tests.support.s3 import Bucket

YESTERDAY = 25 * 3600
TREE = {"w": np.ones(1000, np.float32)}


def test_unfinished_uploads(flag: bool, bucket: Bucket) -> None:
    """Uploads that died a day ago go; running ones, and the checkpoints, stay."""
    url = f"{bucket.url}/run"
    checkpoints.save_checkpoint(url, TREE, 1)
    whole = bucket.keys()
    now = int(time.time())
    bucket.put(f"run/checkpoint_2/_begun.{now - YESTERDAY}.{'0' * 32}", b"")
    bucket.put("run/checkpoint_2/d/0", bytes(100))
    bucket.put(f"run/checkpoint_3/_begun.{now}.{'1' * 32}", b"")
    running = [f"run/checkpoint_3/_begun.{now}.{'1' * 32}"]
    shown = CliRunner().invoke(main, ["clean", url, "--dry-run"])
    assert shown.exit_code == 1
    assert f"   100 B  unfinished upload\n          {url}/checkpoint_2\n" in shown.stdout
    assert "1 to remove, 100 B." in shown.stdout
    assert CliRunner().invoke(main, ["clean", url, "--yes"]).exit_code == 0
    assert bucket.keys() == sorted([*whole, *running])


@pytest.mark.parametrize("live", [False, True])
def test_a_live_writer_protects_what_a_dead_one_left(flag: bool, live: bool, bucket: Bucket) -> None:
    """A save of another step takes no objects from a folder that another process writes to at the time."""
    checkpoints.save_checkpoint(f"{bucket.url}/run", TREE, 1)
    now = int(time.time())
    there = [f"run/checkpoint_0/_begun.{now - YESTERDAY}.{'0' * 32}", "run/checkpoint_0/ocdbt.process_1/d/0"]
    if live:
        there.append(f"run/checkpoint_0/_begun.{now}.{'1' * 32}")
    for key in there:
        bucket.put(key, b"")
    checkpoints.save_checkpoint(f"{bucket.url}/run", TREE, 2, keep=9)
    assert bucket.keys("run/checkpoint_0/") == (sorted(there) if live else [])


@pytest.mark.parametrize("live", [False, True])
def test_arrays_that_another_process_writes_stay(live: bool, bucket: Bucket) -> None:
    """A msgpack file that is replaced takes the arrays beside it along, unless a save by several processes runs."""
    checkpoints.save_checkpoint(f"{bucket.url}/run", TREE, 1)
    now, folder = int(time.time()), "run/checkpoint_1_gda"
    arrays = [f"{folder}/w/.zarray", f"{folder}/w/0.0", f"{folder}/_begun.{now - YESTERDAY}.{'0' * 32}"]
    if live:
        arrays.append(f"{folder}/_begun.{now - YESTERDAY + 7200}.{'1' * 32}")
    for key in (*arrays, f"{folder}/notes"):
        bucket.put(key, b"")
    checkpoints.save_checkpoint(f"{bucket.url}/run", TREE, 1, overwrite=True)
    assert bucket.keys(folder) == sorted([*arrays * live, f"{folder}/notes"])


def test_verify_and_diff(flag: bool, bucket: Bucket, tmp_path: Path) -> None:
    """Checkpoints of a store are verified; a truncated one is damaged, and a strange object is listed."""
    url = f"{bucket.url}/run"
    for place in (url, tmp_path):
        checkpoints.save_checkpoint(place, {"w": np.ones(10_000, np.float32)}, 1)
    assert CliRunner().invoke(main, ["diff", url, str(tmp_path)]).exit_code == 0
    result = CliRunner().invoke(main, ["verify", url])
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{url}/checkpoint_1" in result.stdout
    assert "unexpected" not in result.stdout
    key = max(bucket.keys("run/"), key=lambda key: len(bucket.get(key)))
    whole = bucket.get(key)
    if flag:
        bucket.put("run/checkpoint_1/notes", b"mine")
        assert "unexpected: notes" in CliRunner().invoke(main, ["verify", url]).stdout
    bucket.put(key, whole[:-100])
    damaged = CliRunner().invoke(main, ["verify", url])
    assert damaged.exit_code == 1
    assert "DAMAGED" in damaged.stdout
