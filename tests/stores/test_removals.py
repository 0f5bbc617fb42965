"""What is removed from a store, by evictions, `clean` and the next save; what is refused, and what is told of it."""

import os
import time
from contextlib import suppress
from typing import Any

import pytest
from click.testing import CliRunner

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.object_store import commit
from flax_ckpt_compat.cli import main
from tests.support.s3 import Bucket
from tests.support.saves import start_python, tree, use_flag
from tests.support.store_places import BY_TURNS, AnyBucket


def test_arrays_go_with_their_file(any_bucket: AnyBucket) -> None:
    """What several processes wrote beside an evicted msgpack file is removed with it, and no other folder."""
    root = f"{any_bucket.url}/run"
    flax_ckpt_compat.save(root, tree(1), step=1, format="msgpack")
    for name in ("checkpoint_1_gda/w/.zarray", "checkpoint_1_gda/w/0", "checkpoint_9_gda/w/0"):
        any_bucket.put(f"run/{name}", b"{}")
    flax_ckpt_compat.save(root, tree(2), step=2, format="msgpack", keep=1)
    assert sorted(any_bucket.keys("run/")) == ["run/checkpoint_2", "run/checkpoint_9_gda/w/0"]


@pytest.mark.slow
def test_a_marker_whose_removal_is_refused(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """The save is complete beside it, and evicts what it should; a warning says so once for a folder of checkpoints."""
    root, other = f"{bucket.url}/run", f"{bucket.url}/other"
    with bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" and "/_begun" in path else ""):
        for step in (1, 2):
            flax_ckpt_compat.save(root, tree(step), step=step, format="orbax")
        flax_ckpt_compat.save(other, tree(1), step=1, format="orbax")
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2
    assert all(
        f"Cannot remove what told how far a save was at {one}/checkpoint_1, which does no harm: " in message
        and "_begun" in message
        and "check the credentials" in message
        for one, message in zip((root, other), told, strict=True)
    )
    assert ours.available_steps(root) == [1, 2]
    assert flax_ckpt_compat.restore(root)["n"] == 2
    flax_ckpt_compat.save(root, tree(3), step=3, format="orbax", keep=1)
    assert ours.available_steps(root) == [3]
    assert not [key for key in bucket.keys("run/") if "_begun" in key]


@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_the_loser_hears_of_it(any_bucket: AnyBucket, format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that overwrites an older step removes the newest, whose writer removes that step: saving again helps."""
    root, discard, evicted = f"{any_bucket.url}/run", commit.remove, []

    def with_the_other_writer(url: str) -> None:
        discard(url)
        if url.endswith("checkpoint_9") and not evicted:
            evicted.append(url)
            discard(f"{root}/checkpoint_5")

    with use_flag(format == "orbax"):
        ours.save_checkpoint(root, tree(9), 9)
        monkeypatch.setattr(commit, "remove", with_the_other_writer)
        with pytest.raises(errors.ConcurrentWriteError, match="save again"):
            ours.save_checkpoint(root, tree(5), 5, overwrite=True)
        ours.save_checkpoint(root, tree(5), 5, overwrite=True)
    assert evicted and ours.available_steps(root) == [5]
    assert ours.restore_checkpoint(root, None)["n"] == 5


YESTERDAY = 25 * 3600


@pytest.mark.slow
def test_unfinished_uploads(flag: bool, bucket: Bucket) -> None:
    """Uploads that died a day ago go; running ones, and the checkpoints, stay."""
    url = f"{bucket.url}/run"
    ours.save_checkpoint(url, tree(), 1)
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


@pytest.mark.parametrize("name", ["/_begun", "/commit_success"])
def test_what_nobody_may_read_stays(name: str, bucket: Bucket) -> None:
    """A save of another step sends no other requests to a complete one, of whose dead writer it can learn nothing."""
    root = f"{bucket.url}/run"
    flax_ckpt_compat.save(root, tree(1), step=1, format="orbax")
    bucket.put(f"run/checkpoint_1/_begun.{int(time.time()) - YESTERDAY}.{'0' * 32}", b"")
    bucket.proxy.log.clear()
    with bucket.proxy.failing(lambda method, path: "403" if method == "GET" and name in path else ""):
        flax_ckpt_compat.save(root, tree(2), step=2, format="orbax", keep=9)
    there = [asked.method for asked in bucket.proxy.log if "/checkpoint_1/" in asked.path]
    assert there and set(there) == {"GET"}


@pytest.mark.slow
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("beside", [False, True], ids=["of another step", "beside a file that is replaced"])
def test_a_live_writer_protects_what_a_dead_one_left(flag: bool, beside: bool, live: bool, bucket: Bucket) -> None:
    """A save takes no objects from a folder that another process writes to at the time, and else only arrays."""
    now, folder = int(time.time()), "run/checkpoint_1_gda" if beside else "run/checkpoint_0"
    arrays = ("w/.zarray", "w/0.0") if beside else ("ocdbt.process_1/d/0",)
    there = [f"{folder}/{name}" for name in (f"_begun.{now - YESTERDAY}.{'0' * 32}", *arrays)]
    if live:
        there.append(f"{folder}/_begun.{now - YESTERDAY + 7200}.{'1' * 32}")
    notes = [f"{folder}/notes"] * beside
    with use_flag(flag and not beside):
        ours.save_checkpoint(f"{bucket.url}/run", tree(), 1)
        for key in (*there, *notes):
            bucket.put(key, b"")
        ours.save_checkpoint(f"{bucket.url}/run", tree(), 1 if beside else 2, keep=9, overwrite=beside)
    assert bucket.keys(f"{folder}/") == sorted([*there * live, *notes])


@pytest.mark.parametrize("commits", [False, True])
def test_an_overwrite_that_dies(commits: bool, bucket: Bucket) -> None:
    """After a day, its data goes from the folder that it was to replace; what it has committed stays."""
    root, ended = f"{bucket.url}/run", list[bool]()
    flax_ckpt_compat.save(root, tree(1), step=1, format="orbax")
    before = bucket.keys("run/")

    def rule(method: str, path: str) -> str:
        changes = method in ("PUT", "POST", "DELETE")
        is_other = changes and "/d/" not in path and "/_begun" not in path
        if (method == "DELETE" and "/_begun" in path) or (is_other and not commits):
            ended.append(True)
        return "403" if ended and changes else ""

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
def test_a_program_that_ends_while_it_saves(bucket: Bucket, format: str) -> None:
    """A background save that is not waited for is committed before the interpreter has ended."""
    with bucket.proxy.failing(lambda method, path: "slow" if method == "PUT" else ""):
        process = start_python(AT_EXIT, f"{bucket.url}/run", format, whole_end=True)
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
