"""A step that is being overwritten is complete at each moment, as the old or as the new one, also when the writer dies.

Where the store refuses all requests from one on, it is left as by a writer killed before that request.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.object_store import removal, replace_directory, visible_objects
from tests.stores.test_rules_crash import kill_at
from tests.support import s3
from tests.support.s3 import Bucket
from tests.support.store_places import AnyBucket, put_back
from tests.support.trees import fingerprint

CHANGES = ("PUT", "POST", "DELETE")


def state(number: int) -> dict[str, Any]:
    """A tree that tells in each value which save it is from, and has other names in each."""
    return {"n": number, "w": np.full(700, number, np.float32), f"only_in_{number}": np.arange(5) + number}


def from_change(number: int, fault: s3.Fault = "403") -> s3.Rule:
    """All requests from this change of the store on fail."""
    seen, ended = itertools.count(), []

    def rule(method: str, path: str) -> s3.Fault:
        if method in CHANGES and next(seen) >= number:
            ended.append(True)
        return fault if ended else ""

    return rule


def check(root: str, *numbers: int) -> int:
    """Step 3 is there, wholly of one of these saves, to all functions, and step 2 untouched; returns which."""
    assert ours.available_steps(root) == [2, 3]
    assert ours.latest_checkpoint(root) == f"{root}/checkpoint_3"
    records = {record.step: record.complete for record in flax_ckpt_compat.iter_checkpoints(root)}
    assert records == {2: True, 3: True}
    found = ours.restore_checkpoint(root, None)
    assert found["n"] in numbers
    assert fingerprint(found) == fingerprint(state(found["n"]))
    assert flax_ckpt_compat.plan_restore(root, state(found["n"])).raises is None
    with flax_ckpt_compat.open_checkpoint(f"{root}/checkpoint_3") as opened:
        assert opened.read("n") == {"n": found["n"]}
    return int(found["n"])


def check_real_orbax(bucket: AnyBucket, folder: str, numbers: set[int], to: Path) -> None:
    """Where the sign that real Orbax looks for is there, what real Orbax restores is whole as well."""
    if f"{folder}/commit_success.txt" in bucket.keys(folder):
        found = ocp.PyTreeCheckpointer().restore(bucket.download(folder, to))
        assert found["n"] in numbers
        assert fingerprint(found) == fingerprint(state(found["n"]))


CASES = [
    ("gs", "msgpack msgpack", 3, 12),
    ("s3", "orbax orbax", 0, 25),
    ("s3", "msgpack orbax", 1, 20),
]
LONGER = [*CASES, ("s3", "msgpack msgpack", 0, 9), ("gs", "orbax orbax", 9, 25), ("s3", "orbax msgpack", 0, 16)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("any_bucket", "formats", "first", "every"),
    CASES + [pytest.param(*case[:2], 0, 1, marks=pytest.mark.slow) for case in LONGER],
    indirect=["any_bucket"],
)
def test_an_overwrite_that_ends_before_each_change(
    formats: str, first: int, every: int, any_bucket: AnyBucket, tmp_path: Path
) -> None:
    """Whatever it was killed before: the step is whole, no other is touched, and the next save leaves nothing over."""
    old, new = formats.split()
    for step in (2, 3):
        flax_ckpt_compat.save(f"{any_bucket.url}/first", state(step), step=step, format=old)  # type: ignore[arg-type]
    contents = {key: any_bucket.get(key) for key in any_bucket.keys("first/")}
    seen = []
    for number in sorted({0, *range(first, 100, every)}):
        root = f"{any_bucket.url}/run{number}"
        put_back(any_bucket, contents, f"run{number}")
        ended = None
        try:
            with any_bucket.proxy.failing(from_change(number)):
                flax_ckpt_compat.save(root, state(9), step=3, format=new, overwrite=True)  # type: ignore[arg-type]
        except errors.StorageError as error:
            ended = error
        seen.append(check(root, 3, 9))
        # An error that does not say that it was saved is of a step that still is the old one.
        assert (seen[-1] == 9) == (ended is None or "was saved" in str(ended)), (number, ended)
        if old == new == "orbax":
            check_real_orbax(any_bucket, f"run{number}/checkpoint_3", {3, 9}, tmp_path / str(number))
        if number % 6 == 0 or ended is None:
            flax_ckpt_compat.save(root, state(11), step=3, format=new, overwrite=True)  # type: ignore[arg-type]
            assert check(root, 11) == 11
            assert not [key for key in any_bucket.keys(f"run{number}/") if "_begun" in key or "_next" in key]
            if new == "orbax":
                assert len(any_bucket.keys(f"run{number}/checkpoint_3/")) == 6
        if ended is None:
            break
    assert seen == sorted(seen)  # once it is the new one it stays that
    assert seen[0] == 3
    assert seen[-1] == 9


@pytest.mark.parametrize(
    "at", [("PUT", "commit_success.txt"), pytest.param(("PUT", "checkpoint_3/_METADATA"), marks=pytest.mark.slow)]
)
def test_a_writer_that_is_killed(at: tuple[str, str], bucket: Bucket) -> None:
    """A real one, before its files count, and when the old one no longer does; a second one dies in its stead."""
    root = f"{bucket.url}/run"
    for step in (2, 3):
        flax_ckpt_compat.save(root, state(step), step=step, format="orbax")
    kill_at(bucket, root, 3, "orbax", *at)
    found = ours.restore_checkpoint(root, None)["n"]
    assert found == (3 if at[1] == "commit_success.txt" else 103)
    kill_at(bucket, root, 3, "orbax", "PUT", "commit_success.txt")
    assert ours.restore_checkpoint(root, None)["n"] == found
    assert ours.available_steps(root) == [2, 3]


def aged(bucket: AnyBucket, folder: str) -> None:
    """Makes what a dead writer left a day older."""
    old = str(int(time.time()) - 25 * 3600)
    for key in bucket.keys(folder):
        _, _, name = key.rpartition(f"{folder}/")
        first = name.partition("/")[0]
        if first.startswith(("_begun.", "_next.")):
            number = first.split(".")[1]
            content = bucket.get(key)
            bucket.delete(key)
            bucket.put(key.replace(number, old), content)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_what_a_dead_writer_left_is_completed_after_a_day(any_bucket: AnyBucket, tmp_path: Path, every: int) -> None:
    """Any save into that folder then removes what was never complete, and puts in its place what was."""
    for number in itertools.count(1 if "s3:" in any_bucket.url else 3, every):
        root, folder = f"{any_bucket.url}/run{number}", f"run{number}/checkpoint_3"
        for step in (2, 3):
            flax_ckpt_compat.save(root, state(step), step=step, format="orbax")
        with any_bucket.proxy.failing(from_change(number)):
            try:
                flax_ckpt_compat.save(root, state(9), step=3, format="orbax", overwrite=True)
                break
            except errors.StorageError:
                pass
        found = check(root, 3, 9)
        aged(any_bucket, folder)
        removal.remove_stale(root)
        assert check(root, found) == found
        assert not [key for key in any_bucket.keys(folder) if "_begun" in key or "_next" in key]
        assert f"{folder}/commit_success.txt" in any_bucket.keys(folder)
        assert len(any_bucket.keys(folder)) == 6, any_bucket.keys(folder)
        check_real_orbax(any_bucket, folder, {found}, tmp_path / str(number))


def test_a_copy_without_the_sign(bucket: Bucket, tmp_path: Path) -> None:
    """On s3:// the copy of a local checkpoint is complete without it, and stays so while it is replaced."""
    flax_ckpt_compat.save(tmp_path / "run", state(3), step=3, format="orbax")
    for number in (0, 5):
        root = bucket.upload(tmp_path / "run", f"run{number}")
        flax_ckpt_compat.save(root, state(2), step=2, format="orbax", overwrite=True, keep=0)
        with bucket.proxy.failing(from_change(number)), pytest.raises(errors.StorageError):
            flax_ckpt_compat.save(root, state(9), step=3, format="orbax", overwrite=True)
        check(root, 3, 9)


@pytest.mark.parametrize(
    "sign", ["_next.5.{tag}/commit_success.txt", pytest.param("commit_success.txt", marks=pytest.mark.slow)]
)
def test_a_removal_of_what_was_being_replaced(sign: str, bucket: Bucket) -> None:
    """It never counts again once its removal has begun, at whichever request that ends."""
    tag = "0" * 32
    for number in (1, 2, 3):
        root = f"{bucket.url}/run{number}"
        flax_ckpt_compat.save(root, state(3), step=3, format="orbax")
        for key in bucket.keys(f"run{number}/"):
            bucket.put(key.replace("checkpoint_3/", f"checkpoint_3/_next.5.{tag}/"), bucket.get(key))
        if "_next" in sign:
            bucket.delete(f"run{number}/checkpoint_3/commit_success.txt")
        assert ours.available_steps(root) == [3]
        with bucket.proxy.failing(from_change(number)), pytest.raises(errors.StorageError):
            removal.discard(f"{root}/checkpoint_3")
        there = bool(ours.available_steps(root))
        assert there == (number < (2 if "_next" in sign else 3))
        flax_ckpt_compat.save(root, state(4), step=3, format="orbax", overwrite=True)
        assert flax_ckpt_compat.restore(root)["n"] == 4
        assert len(bucket.keys(f"run{number}/")) == 6


def test_a_removal_of_an_object_and_a_folder_of_one_name(any_bucket: AnyBucket) -> None:
    """The object goes first: it was replaced by the folder, and must not count again once that is gone."""
    root = f"{any_bucket.url}/run"
    flax_ckpt_compat.save(root, state(3), step=3, format="orbax")
    any_bucket.put("run/checkpoint_3", b"\x81\xa1n\x01")
    assert flax_ckpt_compat.restore(root)["n"] == 3
    any_bucket.proxy.log.clear()
    removal.discard(f"{root}/checkpoint_3")
    deleted = [asked.path.partition("?")[0] for asked in any_bucket.proxy.log if asked.method == "DELETE"]
    assert deleted[0].endswith("checkpoint_3") and len(deleted) > 5
    assert any_bucket.keys("run/") == []


def test_arrays_go_with_their_file(any_bucket: AnyBucket) -> None:
    """What several processes wrote beside an evicted msgpack file is removed with it, and no other folder."""
    root = f"{any_bucket.url}/run"
    flax_ckpt_compat.save(root, state(1), step=1, format="msgpack")
    for name in ("checkpoint_1_gda/w/.zarray", "checkpoint_1_gda/w/0", "checkpoint_9_gda/w/0"):
        any_bucket.put(f"run/{name}", b"{}")
    flax_ckpt_compat.save(root, state(2), step=2, format="msgpack", keep=1)
    assert sorted(any_bucket.keys("run/")) == ["run/checkpoint_2", "run/checkpoint_9_gda/w/0"]


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_removal_that_is_refused(format: Any, bucket: Bucket) -> None:
    """The save says that it is complete, and what is left over."""
    root = f"{bucket.url}/run"
    flax_ckpt_compat.save(root, state(1), step=1, format=format)
    with (
        bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" and "checkpoint_1" in path else ""),
        pytest.raises(errors.CleanupError, match=r"was saved.*checkpoint_1"),
    ):
        flax_ckpt_compat.save(root, state(2), step=2, format=format, keep=1)
    assert flax_ckpt_compat.restore(root)["n"] == 2


def test_a_marker_whose_removal_is_refused(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """The save is complete beside it, and evicts what it should; a warning says so once for a folder of checkpoints."""
    root, other = f"{bucket.url}/run", f"{bucket.url}/other"
    with bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" and "/_begun" in path else ""):
        for step in (1, 2):
            flax_ckpt_compat.save(root, state(step), step=step, format="orbax")
        flax_ckpt_compat.save(other, state(1), step=1, format="orbax")
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 2
    assert all(
        f"Cannot remove the marker of a save that is complete at {one}/checkpoint_1: " in message
        and "_begun" in message
        and "do not permit this in the bucket" in message
        for one, message in zip((root, other), told, strict=True)
    )
    assert ours.available_steps(root) == [1, 2]
    assert flax_ckpt_compat.restore(root)["n"] == 2
    flax_ckpt_compat.save(root, state(3), step=3, format="orbax", keep=1)
    assert ours.available_steps(root) == [3]
    assert not [key for key in bucket.keys("run/") if "_begun" in key]


def test_evictions_that_are_always_refused(bucket: Bucket) -> None:
    """Each save says so, and adds no further object to the old checkpoints: 30 saves would add 435."""
    root = f"{bucket.url}/run"
    with bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" else ""):
        flax_ckpt_compat.save(root, state(1), step=1, format="orbax")
        for step in (2, 3, 4):
            with pytest.raises(errors.CleanupError, match=rf"checkpoint_{step} was saved.*checkpoint_\d"):
                flax_ckpt_compat.save(root, state(step), step=step, format="orbax", keep=1)
        with pytest.raises(errors.StorageError, match=r"commit_success\.txt could not be deleted"):
            flax_ckpt_compat.save(root, state(30), step=3, format="orbax", overwrite=True)
    markers = [key.split("/")[1] for key in bucket.keys("run/") if "/_begun" in key]
    # That of the save, and that of all evictions; another one of the save that failed.
    assert markers == ["checkpoint_1"] * 2 + ["checkpoint_2"] * 2 + ["checkpoint_3"] * 3 + ["checkpoint_4"]
    assert ours.available_steps(root) == [1, 2, 3, 4]
    assert flax_ckpt_compat.restore(root, step=3)["n"] == 3
    flax_ckpt_compat.save(root, state(5), step=5, format="orbax", keep=1)
    assert ours.available_steps(root) == [5]
    assert not [key for key in bucket.keys("run/") if "checkpoint_5" not in key]


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_bucket_with_versions(format: Any, bucket: Bucket) -> None:
    """There a deletion hides the object, and a write hides the old one: neither comes back."""
    status = b'<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>Enabled</Status>'
    bucket._ask("PUT", "?versioning", status + b"</VersioningConfiguration>")
    root = f"{bucket.url}/run"
    for step in (1, 2, 3):
        flax_ckpt_compat.save(root, state(step), step=step, format=format, keep=2)
    flax_ckpt_compat.save(root, state(30), step=3, format=format, keep=2, overwrite=True)
    flax_ckpt_compat.save(root, state(20), step=2, format=format, overwrite=True)
    assert ours.available_steps(root) == [2, 3]
    assert [flax_ckpt_compat.restore(root, step=step)["n"] for step in (2, 3)] == [20, 30]
    assert not flax_ckpt_compat.verify(root).damaged
    assert not [key for key in bucket.keys("run/") if "checkpoint_1" in key]


def test_leftovers_that_are_never_let_go(bucket: Bucket) -> None:
    """A day later, a process looks once whether it can remove the marker of a complete checkpoint, not in each save."""
    root = f"{bucket.url}/run"
    flax_ckpt_compat.save(root, state(1), step=1, format="orbax")
    bucket.put(f"run/checkpoint_1/_begun.5.{'1' * 32}", b"")
    with bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" and "checkpoint_1" in path else ""):
        for step in (2, 3):
            flax_ckpt_compat.save(root, state(step), step=step, format="orbax")
        refused = [asked for asked in bucket.proxy.log if asked.fault]
    assert [asked.path.rpartition("/")[2] for asked in refused] == [f"_begun.5.{'1' * 32}"]
    assert flax_ckpt_compat.restore(root, step=1)["n"] == 1


def test_the_sign_of_a_finished_replacement_stays_longest(any_bucket: AnyBucket) -> None:
    """Where the rest below it is gone, the folder's own sign counts, also for who replaces or removes it."""
    root = f"{any_bucket.url}/run"

    def rule(method: str, path: str) -> s3.Fault:
        return "403" if method == "DELETE" and "_next" in path and "commit_success" in path else ""

    for number in (9, 11):
        for step in (2, 3):
            flax_ckpt_compat.save(root, state(step), step=step, format="orbax", overwrite=True)
        with any_bucket.proxy.failing(rule), pytest.raises(errors.CleanupError, match="was saved"):
            flax_ckpt_compat.save(root, state(9), step=3, format="orbax", overwrite=True)
        sign, *others = sorted(
            any_bucket.keys("run/"), key=lambda key: ("_next" not in key, "commit_success" not in key)
        )
        assert "_next" in sign and sign.endswith("/commit_success.txt")
        for key in others:
            if "_next" in key:
                any_bucket.delete(key)
        assert check(root, 9) == 9
        if number == 11:
            flax_ckpt_compat.save(root, state(11), step=3, format="orbax", overwrite=True)
            assert check(root, 11) == 11
            assert len(any_bucket.keys("run/checkpoint_3/")) == 6
        else:
            flax_ckpt_compat.save(root, state(4), step=4, format="orbax", keep=1)
            assert {key.split("/")[1] for key in any_bucket.keys("run/")} == {"checkpoint_4"}
            removal.discard(f"{root}/checkpoint_4")


def test_only_checkpoints_are_replaced_however_late_they_come(any_bucket: AnyBucket) -> None:
    """What another program puts there after the first look at the old file is looked at, too; it stays as it is."""
    root, other, log = f"{any_bucket.url}/run", b"<html>no checkpoint</html>" * 9, any_bucket.proxy.log
    flax_ckpt_compat.save(root, state(2), step=2, format="msgpack")
    old = any_bucket.get("run/checkpoint_2")
    for at in range(20):
        any_bucket.put("run/checkpoint_2", old)
        asked = itertools.count()

        def rule(method: str, path: str, at: int = at, asked: Any = asked) -> s3.Fault:
            if next(asked) == at:
                any_bucket.put("run/checkpoint_2", other)
            return ""

        log.clear()
        try:
            with any_bucket.proxy.failing(rule):
                flax_ckpt_compat.save(root, state(3), step=2, format="msgpack", overwrite=True)
        except errors.InvalidCheckpointError as error:
            assert "only checkpoints are replaced" in str(error)
            assert any_bucket.get("run/checkpoint_2") == other
        else:
            break
    # Not before the upload looks for the version that it replaces: after the second list, and the version behind it.
    lists = [number for number, one in enumerate(log) if "list-type=" in one.path or "startOffset=" in one.path]
    assert at > lists[1] + 1


def test_the_parts_of_several_processes_are_completed(bucket: Bucket, tmp_path: Path) -> None:
    """What they wrote of a save that replaced another, and whose writer died behind its commit, stays; and is named."""
    url, tag = f"{bucket.url}/run/c", "a" * 32
    flax_ckpt_compat.save(url, state(3), format="orbax")
    for key in bucket.keys("run/c/"):
        bucket.put(key.replace("/c/", f"/c/_next.5.{tag}/"), bucket.get(key))
    bucket.delete("run/c/commit_success.txt")
    mine, others = (f"run/c/ocdbt.process_1.{one}/d/{'1' * 32}" for one in (tag, "b" * 32))
    for key in (mine, others):
        bucket.put(key, b"")
    replace_directory.resume(url, str(tmp_path / "staged"))
    there = set(bucket.keys())
    assert mine in there and others not in there
    assert tag in bucket.get("run/c/commit_success.txt").decode()
    assert fingerprint(flax_ckpt_compat.restore(url)) == fingerprint(state(3))


def test_visible_objects() -> None:
    """Which names are to be seen, and where they lie."""
    one, two = "_next.5." + "1" * 32, "_next.6." + "2" * 32
    data = "d/" + "a" * 32
    old = ["_METADATA", "commit_success.txt", data, "state/_METADATA"]
    new = [f"{one}/_METADATA", f"{one}/manifest.ocdbt"]
    assert visible_objects.visible([*old, *new]) == old
    committed = [*new, f"{one}/commit_success.txt"]
    assert visible_objects.visible([*old, *committed]) == old
    without = [name for name in old if name != "commit_success.txt"]
    assert visible_objects.visible([*without, *new]) == sorted(without)
    expected = ["_METADATA", "commit_success.txt", data, "manifest.ocdbt"]
    assert visible_objects.visible([*without, *committed, f"{two}/_METADATA"]) == expected
    assert visible_objects.current_folder([*without, *committed, f"{two}/commit_success.txt"]) == two
    assert visible_objects.resolve_key(f"run/c/{one}/{data}") == f"run/c/{data}"
    assert visible_objects.resolve_key(f"run/c/{one}/_METADATA") == f"run/c/{one}/_METADATA"
    assert visible_objects.resolve_key(f"run/c/{one}/ocdbt.process_0.{'1' * 32}/{data}") == (
        f"run/c/ocdbt.process_0.{'1' * 32}/{data}"
    )
    processes = [f"ocdbt.process_0.{digit * 32}/d/x" for digit in "12"]
    marker = "_begun.9." + "3" * 32
    found = visible_objects.visible(sorted([*without, *committed, *processes, marker, f"{one}/_data.txt"]))
    assert found == sorted([*expected, processes[0], marker])
    assert visible_objects.order_of(one) == (5, "1" * 32)
    assert visible_objects.order_of(f"state/{one}") == visible_objects.order_of("_METADATA") == (0, "")
    last = "commit_success.txt"
    assert visible_objects.commit_files([f"{two}/{last}", last, f"{one}/{last}"]) == [
        f"{one}/{last}",
        f"{two}/{last}",
        last,
    ]
