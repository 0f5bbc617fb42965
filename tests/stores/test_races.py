"""Two writers of one checkpoint: one wins, the other is told, and what is there is the winner's to the last value."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.object_store import client, commit, multiprocess, removal, uploads, writer_markers
from flax_ckpt_compat._core.object_store.writer_markers import WriteLease
from tests.support.gs import GsBucket
from tests.support.s3 import Bucket
from tests.support.saves import start_python
from tests.support.store_places import AnyBucket

LARGE = bytes(range(256)) * 8192  # 2 MiB: sent from the file itself


def tree(number: int) -> dict[str, Any]:
    """A tree that tells in every value which save it is from."""
    return {"n": number, "w": np.full(30_000, number), "small": {str(i): np.full(3, number) for i in range(20)}}


def check(url: str, number: int) -> None:
    """What is there is wholly of this save."""
    found = flax_ckpt_compat.restore(url)
    assert found["n"] == number
    assert all(np.all(value == number) for value in (found["w"], *found["small"].values()))


def race(url: str, format: Any, overwrite: bool) -> dict[int, str]:
    """Two threads save at once; returns what became of each."""
    ready, told = threading.Barrier(2), {}

    def save(number: int) -> None:
        ready.wait()
        try:
            flax_ckpt_compat.save(url, tree(number), format=format, overwrite=overwrite)
            told[number] = "saved"
        except (errors.StorageError, errors.InvalidCheckpointError) as error:
            told[number] = str(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_two_writers_that_begin_within_one_second(any_bucket: AnyBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """And see nothing of each other then: their markers have one number, and just one of them may go on."""
    monkeypatch.setattr(writer_markers.time, "time", lambda: 1.8e9)
    leases = [WriteLease(f"{any_bucket.url}/run/c", initial=()) for _ in range(3)]
    assert len({lease.marker.split(".")[1] for lease in leases}) == 1
    held = list[WriteLease]()
    for lease in leases:
        try:
            lease.list_others()
            held.append(lease)
        except errors.ConcurrentWriteError:
            pass
    assert len(held) == 1


@pytest.mark.parametrize("attempt", [0, *(pytest.param(attempt, marks=pytest.mark.slow) for attempt in (1, 2))])
@pytest.mark.parametrize("how", ["msgpack", "orbax", "orbax overwrites"])
def test_one_of_two_threads_wins(how: str, attempt: int, bucket: Bucket) -> None:
    """Just one save succeeds, and its values are there; the other names the reason, and leaves nothing behind."""
    format, _, overwrites = how.partition(" ")
    url = f"{bucket.url}/run/checkpoint_{attempt}"
    if overwrites:
        flax_ckpt_compat.save(url, tree(9), format=format)  # type: ignore[arg-type]
    told = race(url, format, bool(overwrites))
    (winner,) = (number for number, what in told.items() if what == "saved")
    assert "another process" in told[3 - winner] or "exists" in told[3 - winner]
    check(url, winner)
    assert not [key for key in bucket.keys("run/") if "_begun" in key]


SAVE = """
import os, sys, time
import flax_ckpt_compat
from tests.stores.test_races import tree
url, number, flag = sys.argv[1:]
for format in ("msgpack", "orbax"):
    print("ready", flush=True)
    while not os.path.exists(flag + format):
        time.sleep(0.001)
    try:
        flax_ckpt_compat.save(f"{url}/{format}", tree(int(number)), format=format)
        print("saved", flush=True)
    except (flax_ckpt_compat.errors.StorageError, flax_ckpt_compat.errors.InvalidCheckpointError) as error:
        print(error, flush=True)
"""


def test_one_of_two_processes_wins(bucket: Bucket, tmp_path: Path) -> None:
    """The same with writers that share nothing but the store."""
    url = f"{bucket.url}/run"
    writers = [start_python(SAVE, url, number, f"{tmp_path}/go-") for number in (1, 2)]
    for format in ("msgpack", "orbax"):
        assert [line(writer) for writer in writers] == ["ready", "ready"]
        (tmp_path / f"go-{format}").touch()
        told = {number: line(writer) for number, writer in enumerate(writers, 1)}
        (winner,) = (number for number, what in told.items() if what == "saved")
        assert "another process" in told[3 - winner] or "exists" in told[3 - winner]
        check(f"{url}/{format}", winner)
    for writer in writers:
        writer.communicate(timeout=60)


def line(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def test_just_the_version_that_was_seen_is_replaced(bucket: Bucket, tmp_path: Path) -> None:
    """What another writer has replaced, removed or written since stays; what nobody touched is replaced."""
    names = ["same", "replaced", "removed", "new", "appeared"]
    for name in names:
        (tmp_path / name).write_bytes(b"ours")
    for name in names[:3]:
        bucket.put(f"run/{name}", b"old")
    seen = uploads.versions(f"{bucket.url}/run", names)
    bucket.delete("run/removed")
    for name in ("replaced", "appeared"):
        bucket.put(f"run/{name}", b"another's")
    taken = uploads.upload(str(tmp_path), f"{bucket.url}/run", names, seen)
    assert sorted(taken) == ["appeared", "removed", "replaced"]
    found = {key.removeprefix("run/"): bucket.get(key) for key in bucket.keys("run/")}
    assert found == {"same": b"ours", "new": b"ours", "replaced": b"another's", "appeared": b"another's"}


def test_a_deletion_that_comes_late_deletes_no_newer_version(gs_bucket: GsBucket) -> None:
    """Another writer has replaced the object since its version was looked up."""
    url = f"{gs_bucket.url}/key"
    client.write(url, b"old")
    seen = client.version(url)
    client.write(url, b"new")
    assert not client.delete_version(url, seen)
    assert client.read(url) == b"new"
    assert client.delete_version(url, client.version(url))
    assert not client.is_object(url)


@pytest.mark.parametrize("content", [b"mine", LARGE], ids=["small", "large"])
@pytest.mark.parametrize("there", [None, b"", b"mine", b"other", b"mine too", LARGE, LARGE[::-1], LARGE[:-1] + b"\0"])
def test_only_where_there_is_nothing(
    content: bytes, there: bytes | None, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's object stays; an empty one is none; one of the same content is what was to be written."""
    monkeypatch.setattr(uploads, "_COMPARE_BYTES", 1 << 20)
    if there is not None:
        bucket.put("key", there)
    (tmp_path / "file").write_bytes(content)
    written = uploads.publish_file(str(tmp_path / "file"), f"{bucket.url}/key", new=True)
    assert written == (not there or there == content)
    assert bucket.get("key") == (content if written else there)


@pytest.mark.parametrize("content", [b"mine", LARGE], ids=["small", "large"])
def test_an_object_that_comes_between_looking_and_writing(content: bytes, bucket: Bucket, tmp_path: Path) -> None:
    """The store itself refuses, so nothing is lost that came at the last moment."""
    (tmp_path / "file").write_bytes(content)

    def rule(method: str, path: str) -> str:
        if method == "PUT":
            bucket.put("key", b"other")
        return ""

    with bucket.proxy.failing(rule):
        assert not uploads.publish_file(str(tmp_path / "file"), f"{bucket.url}/key", new=True)
    assert bucket.get("key") == b"other"


@pytest.mark.parametrize("content", [b"mine", LARGE], ids=["small", "large"])
@pytest.mark.parametrize("number", [1, 2, 100])
def test_a_file_replaces_what_comes_between(content: bytes, number: int, any_bucket: AnyBucket, tmp_path: Path) -> None:
    """The writer that ends last replaces what it finds then; one that never finds it unchanged gives up."""
    (tmp_path / "file").write_bytes(content)
    any_bucket.put("key", b"old")
    writers = iter(range(number))

    def rule(method: str, path: str) -> str:
        if method in ("PUT", "POST") and (writer := next(writers, None)) is not None:
            any_bucket.put("key", b"other %d" % writer)
        return ""

    with any_bucket.proxy.failing(rule):
        written = uploads.publish_file(str(tmp_path / "file"), f"{any_bucket.url}/key", new=False)
    assert written == (number < 100)
    assert (any_bucket.get("key") == content) == written


@pytest.mark.parametrize("fault", ["lose", "refuse", "500", "501", "cut"])
@pytest.mark.parametrize("content", [b"mine", LARGE], ids=["small", "large"])
@pytest.mark.parametrize("new", [True, False])
def test_ones_own_write_is_no_other_writers(
    new: bool, content: bytes, fault: str, bucket: Bucket, tmp_path: Path
) -> None:
    """A repeated request finds what the first one did, whose answer was lost; stores without conditions just write."""
    (tmp_path / "file").write_bytes(content)
    if not new:
        bucket.put("key", b"old")
    with bucket.proxy.failing(at_first(lambda method, path: method == "PUT", fault)):
        assert uploads.publish_file(str(tmp_path / "file"), f"{bucket.url}/key", new=new)
    assert bucket.get("key") == content
    puts = [asked for asked in bucket.proxy.log if asked.method == "PUT"]
    assert len(puts) <= 2


@pytest.mark.parametrize("content", [b"mine", LARGE], ids=["small", "large"])
@pytest.mark.parametrize("new", [True, False])
def test_a_write_that_is_refused(new: bool, content: bytes, bucket: Bucket, tmp_path: Path) -> None:
    """It is an error, and not what another writer wrote, unless that is the same."""
    (tmp_path / "file").write_bytes(content)
    with (
        bucket.proxy.failing(lambda method, path: "403" if method == "PUT" else ""),
        pytest.raises(errors.StorageError, match="AccessDenied"),
    ):
        uploads.publish_file(str(tmp_path / "file"), f"{bucket.url}/key", new=new)
    assert bucket.keys() == []


def at_first(chosen: Callable[[str, str], bool], fault: str) -> Callable[[str, str], str]:
    """A rule by which the first request of a kind fails."""
    done: list[bool] = []

    def rule(method: str, path: str) -> str:
        if done or not chosen(method, path):
            return ""
        done.append(True)
        return fault

    return rule


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_commit_of_which_the_answer_is_lost(format: Any, bucket: Bucket) -> None:
    """It is the save's own, and the save succeeds."""
    url = f"{bucket.url}/run/checkpoint_1"
    ending = "checkpoint_1" if format == "msgpack" else "commit_success.txt"
    with bucket.proxy.failing(at_first(lambda method, path: method == "PUT" and path.endswith(ending), "lose")):
        flax_ckpt_compat.save(url, tree(1), format=format)
    check(url, 1)


def test_a_commit_that_another_writer_began_to_remove(bucket: Bucket) -> None:
    """Who commits after another has begun waits for what that one does, and tells its loss."""
    url = f"{bucket.url}/run/checkpoint_1"
    first = writer_markers.WriteLease(url)
    client.write(f"{url}/a", b"1")
    second = writer_markers.WriteLease(url)
    timer = threading.Timer(0.5, second.clear)
    timer.start()
    with pytest.raises(errors.ConcurrentWriteError, match="another process"):
        first.commit(["a"])
    timer.join()
    assert bucket.keys("run/") == [f"run/checkpoint_1/{second.marker}"]


def test_a_commit_after_another_writer_has_removed_all(bucket: Bucket) -> None:
    """The commit file, which that one did not see, goes too: what it removed must not count as a checkpoint."""
    url = f"{bucket.url}/run/checkpoint_1"
    first = writer_markers.WriteLease(url)
    client.write(f"{url}/a", b"1")
    second = writer_markers.WriteLease(url)
    second.clear()
    with pytest.raises(errors.ConcurrentWriteError, match="another process"):
        first.commit(["a"])
    assert bucket.keys("run/") == [f"run/checkpoint_1/{second.marker}"]


@pytest.mark.parametrize("moment", ["list", "commit_success.txt"])
def test_an_overwrite_that_another_writer_interrupts(moment: str, bucket: Bucket) -> None:
    """The old checkpoint stays whole, and nothing of the new one, if its data are removed or a newer writer begins."""
    url = f"{bucket.url}/run/checkpoint_1"
    flax_ckpt_compat.save(url, tree(1), format="orbax")
    before = bucket.keys("run/")
    marker = f"run/checkpoint_1/_begun.{int(time.time()) + 60}.{'f' * 32}"

    def rule(method: str, path: str) -> str:
        if moment == "list" and "list-type" in path:  # the first one that finds new data
            for key in set(bucket.keys("run/checkpoint_1/d/")).difference(before):
                bucket.delete(key)
        elif method == "PUT" and "/_next." in path and path.endswith(f"/{moment}"):
            bucket.put(marker, b"")
        return ""

    bucket.proxy.log.clear()
    with bucket.proxy.failing(rule), pytest.raises(errors.ConcurrentWriteError, match="another process"):
        flax_ckpt_compat.save(url, tree(2), format="orbax", overwrite=True)
    deleted = [asked.path for asked in bucket.proxy.log if asked.method == "DELETE" and "_begun" not in asked.path]
    assert deleted[0].endswith("/commit_success.txt")  # what is half removed must not count
    assert bucket.keys("run/") == sorted([*before, *([] if moment == "list" else [marker])])
    check(url, 1)


@pytest.mark.slow
def test_a_save_that_lost_leaves_no_data(bucket: Bucket) -> None:
    """A newer writer, which began while the last files were sent, has nothing of it to remove."""
    marker = f"run/checkpoint_1/_begun.{int(time.time()) + 60}.{'f' * 32}"

    def rule(method: str, path: str) -> str:
        if method == "PUT" and "_begun" not in path:
            bucket.put(marker, b"")
        return ""

    with bucket.proxy.failing(rule), pytest.raises(errors.ConcurrentWriteError, match="another process"):
        flax_ckpt_compat.save(f"{bucket.url}/run/checkpoint_1", tree(1), format="orbax")
    assert [key for key in bucket.keys("run/checkpoint_1/") if "/d/" in key] == []
    assert marker in bucket.keys("run/")


def test_a_commit_that_another_writer_respects(bucket: Bucket) -> None:
    """Who began while another committed, and may not replace it, gives up; the one that committed succeeds."""
    url = f"{bucket.url}/run/checkpoint_1"
    first = writer_markers.WriteLease(url)
    second = writer_markers.WriteLease(url)
    lost: list[Exception] = []

    def give_way() -> None:
        try:
            second.clear(keep_committed=True)
        except errors.StorageError as error:
            lost.append(error)

    timer = threading.Timer(0.5, give_way)
    timer.start()
    first.commit([])
    timer.join()
    assert len(lost) == 1
    assert bucket.keys("run/") == ["run/checkpoint_1/commit_success.txt"]


def test_a_clock_that_is_behind(bucket: Bucket) -> None:
    """The last one to begin wins, also where the other's machine is an hour ahead."""
    url, number = f"{bucket.url}/run/checkpoint_1", int(time.time()) + 3600
    bucket.put(f"run/checkpoint_1/_begun.{number}.{'f' * 32}", b"")
    mine = writer_markers.WriteLease(url)
    assert mine.list_others() == {f"_begun.{number}.{'f' * 32}"}
    bucket.put(f"run/checkpoint_1/_begun.{number + 2}.{'0' * 32}", b"")
    with pytest.raises(errors.ConcurrentWriteError):
        mine.list_others()


@pytest.mark.parametrize("ahead", [0, 3600])
def test_a_marker_that_arrives_with_ours(ahead: int, bucket: Bucket) -> None:
    """Whose writer died, also one whose clock is ahead: the list behind our own shows it, and the save begins anew."""
    url, other = f"{bucket.url}/run/checkpoint_1", f"_begun.{int(time.time()) + ahead}.{'f' * 32}"

    def rule(method: str, path: str) -> str:
        bucket.put(f"run/checkpoint_1/{other}", b"")
        return ""

    with bucket.proxy.failing(at_first_marker(rule)):
        flax_ckpt_compat.save(url, tree(1), format="orbax")
    check(url, 1)
    assert not [key for key in bucket.keys("run/") if "_begun" in key]


def at_first_marker(rule: Callable[[str, str], str]) -> Callable[[str, str], str]:
    """The rule, before the first marker of a save is written."""
    seen: list[str] = []

    def once(method: str, path: str) -> str:
        if method == "PUT" and "/_begun." in path and not seen:
            seen.append(path)
            return rule(method, path)
        return ""

    return once


def test_an_object_that_arrives_with_the_marker(bucket: Bucket) -> None:
    """The folder counts, whether the save saw the object or not."""
    url = f"{bucket.url}/run/checkpoint_1"

    def rule(method: str, path: str) -> str:
        bucket.put("run/checkpoint_1", b"")
        return ""

    with bucket.proxy.failing(at_first_marker(rule)):
        flax_ckpt_compat.save(url, tree(1), format="orbax")
    check(url, 1)


def test_a_commit_that_another_one_replaced(bucket: Bucket) -> None:
    """Who finds that others removed what it committed removes its own commit file, and not that of another writer."""
    key, others = "run/checkpoint_1/commit_success.txt", b"_begun.1." + b"0" * 32
    first = writer_markers.WriteLease(f"{bucket.url}/run/checkpoint_1")

    def rule(method: str, path: str) -> str:
        if "list-type" in path and bucket.keys(key):
            bucket.put(key, others)
        return ""

    with bucket.proxy.failing(rule), pytest.raises(errors.ConcurrentWriteError):
        first.commit(["gone"])
    assert bucket.keys() == [key] and bucket.get(key) == others


def test_a_marker_outlives_what_it_is_for(bucket: Bucket) -> None:
    """Only by it others know of what is left over, so it stays where that cannot be removed."""
    url = f"{bucket.url}/run/checkpoint_1"
    flax_ckpt_compat.save(url, tree(1), format="orbax")
    with (
        bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" and "/_next." in path else ""),
        pytest.raises(errors.CleanupError, match="was saved"),
    ):
        flax_ckpt_compat.save(url, tree(2), format="orbax", overwrite=True)
    assert [key for key in bucket.keys("run/") if "/_begun." in key]
    check(url, 2)


def test_an_object_that_is_newer_than_the_folder(bucket: Bucket) -> None:
    """What another writer put in place of the object that a directory replaces is not removed with it."""
    bucket.put("run/c", b"\x81\xa1n\x01")

    def rule(method: str, path: str) -> str:
        if method == "PUT" and path.endswith("/commit_success.txt"):
            bucket.put("run/c", b"\x81\xa1n\x02")
        return ""

    with bucket.proxy.failing(rule):
        flax_ckpt_compat.save(f"{bucket.url}/run/c", {"n": 3}, format="orbax", overwrite=True)
    assert bucket.get("run/c") == b"\x81\xa1n\x02"


@pytest.mark.parametrize("replaces", [False, True])
def test_a_removal_spares_a_newer_object(replaces: bool, gs_bucket: GsBucket) -> None:
    """One that came between looking and deleting, for a removal or for the directory that replaces it."""
    gs_bucket.put("run/c", b"\x81\xa1n\x01")

    def rule(method: str, path: str) -> str:
        if method == "DELETE" and path.partition("?")[0].endswith("run%2Fc"):
            gs_bucket.put("run/c", b"\x81\xa1n\x02")
        return ""

    with gs_bucket.proxy.failing(rule):
        if replaces:
            flax_ckpt_compat.save(f"{gs_bucket.url}/run/c", {"n": 3}, format="orbax", overwrite=True)
        else:
            removal.discard(f"{gs_bucket.url}/run/c")
    assert gs_bucket.get("run/c") == b"\x81\xa1n\x02"


def test_a_file_that_the_writer_of_a_folder_removes(bucket: Bucket, tmp_path: Path) -> None:
    """As what it replaces: it is put back, because it came later."""
    (tmp_path / "file").write_bytes(b"\x81\xa1n\x03")
    bucket.put("run/c/x", b"")

    def rule(method: str, path: str) -> str:
        if method == "DELETE" and path.endswith("/c/x"):
            bucket.delete("run/c")
        return ""

    with bucket.proxy.failing(rule):
        commit.publish(str(tmp_path / "file"), f"{bucket.url}/run/c")
    assert (bucket.keys(), bucket.get("run/c")) == (["run/c"], b"\x81\xa1n\x03")


@pytest.mark.parametrize("sign", ["commit_success.txt", "{next}/commit_success.txt"])
def test_what_is_committed_is_not_aborted(sign: str, bucket: Bucket) -> None:
    """A save by several processes that fails behind its commit keeps their parts; one before removes them."""
    upload = multiprocess.begin(f"{bucket.url}/run/c", in_gda_folder=False)
    part = f"run/c/ocdbt.process_1{upload.tag}/d/{'0' * 32}"
    bucket.put(part, b"")
    key = "run/c/" + sign.format(next=upload.marker.replace("_begun", "_next"))
    bucket.put(key, upload.marker.encode())
    upload.abort()
    assert {part, key} <= set(bucket.keys())
    bucket.delete(key)
    upload.abort()
    assert bucket.keys() == []


def test_a_store_without_conditions_keeps_what_others_wrote(bucket: Bucket, tmp_path: Path) -> None:
    """It refuses the conditional request as such, and who looks again does not write."""
    (tmp_path / "file").write_bytes(b"mine")

    def rule(method: str, path: str) -> str:
        if method == "PUT":
            bucket.put("key", b"other")
            return "501"
        return ""

    with bucket.proxy.failing(rule):
        assert not uploads.publish_file(str(tmp_path / "file"), f"{bucket.url}/key", new=True)
    assert bucket.get("key") == b"other"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_store_without_conditions(format: Any, overwrite: bool, bucket: Bucket) -> None:
    """Where a store refuses conditional requests as such, saves go on as if there were none."""
    url = f"{bucket.url}/run/checkpoint_1"
    if overwrite:
        flax_ckpt_compat.save(url, tree(9) | {"large": LARGE}, format=format)
    bucket.proxy.refuses_conditions = True
    try:
        flax_ckpt_compat.save(url, tree(1) | {"large": LARGE[::-1]}, format=format, overwrite=overwrite)
    finally:
        bucket.proxy.refuses_conditions = False
    assert "501" in {asked.fault for asked in bucket.proxy.log} or (format, overwrite) == ("msgpack", True)
    check(url, 1)
    assert flax_ckpt_compat.restore(url)["large"] == LARGE[::-1]
