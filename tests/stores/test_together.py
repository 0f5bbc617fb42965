"""Saves by several processes straight to a store: all of it or nothing, and no array passes through process 0."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import verify
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.local import temporaries
from flax_ckpt_compat._core.location import location_of
from flax_ckpt_compat._core.object_store import commit as uploads
from flax_ckpt_compat.errors import ConcurrentWriteError
from tests.multiprocess import jobs, real_jobs, store_jobs
from tests.support import s3
from tests.support.s3 import Bucket, Proxy
from tests.support.saves import use_flag
from tests.support.team import Team, team_of

WAIT = 1.0


@pytest.fixture
def proxies(bucket: Bucket) -> Iterator[list[Proxy]]:
    """A proxy for each of two processes."""
    second = Proxy(s3.moto)
    yield [bucket.proxy, second]
    second.close()


def led(team: Team, *proxies: Proxy) -> Team:
    """The team, led to the server through these proxies."""
    every = [s3.environment(proxies[min(index, len(proxies) - 1)]) for index in range(team.count)]
    team.call(store_jobs.lead_to, every)
    return team


def folders(bucket: Bucket) -> set[str]:
    """The folders of the arrays that are there; each save has names of its own."""
    return {key.split("/")[2] for key in bucket.keys("run/") if "/ocdbt.process_" in key or "_gda/" in key}


@pytest.mark.slow
def test_every_bit_comes_back(orbax: bool, bucket: Bucket) -> None:
    """Two processes save; two on another mesh, and one alone, find all that was saved, and nothing is left over."""
    team, root = led(team_of(2), bucket.proxy), f"{bucket.url}/run"
    assert team.call(jobs.save_mixed, root, orbax, "plain") == [f"{root}/checkpoint_1"] * 2
    team.call(jobs.restore_mixed, root, orbax, "turned", True)
    led(team_of(1), bucket.proxy).call(jobs.restore_mixed, root, orbax, "plain")
    assert "_begun" not in " ".join(bucket.keys())
    assert team.call(store_jobs.left_over) == [[], []]


@pytest.mark.slow
def test_a_store_that_refuses_to_delete(orbax: bool, bucket: Bucket) -> None:
    """What both processes save is there; the objects that tell how far the save is stay beside it."""
    team, root = led(team_of(2), bucket.proxy), f"{bucket.url}/run"
    with bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" else ""):
        assert team.call(jobs.save_mixed, root, orbax, "plain") == [f"{root}/checkpoint_1"] * 2
    team.call(jobs.restore_mixed, root, orbax, "turned", True)
    assert ours.available_steps(root) == [1]
    assert not verify(root).damaged


@pytest.mark.slow
def test_overwriting_and_other_formats(bucket: Bucket) -> None:
    """A step replaces itself in its own format and in the other one, and only the arrays of the last one stay.

    One of the same tree is complete at every moment.
    """
    team, root = led(team_of(2), bucket.proxy), f"{bucket.url}/run"
    for value, orbax in enumerate([False, False, True, True, False]):
        bucket.proxy.log.clear()
        team.call(store_jobs.overwrite, root, orbax, 4, value, 60.0)
        uncommits = [asked for asked in bucket.proxy.log if asked.method == "DELETE" and "commit_success" in asked.path]
        assert bool(uncommits) == (value == 4)
        assert team.call(jobs.restore_small, root) == [value, value]
        assert len({name.rpartition(".")[2] for name in folders(bucket)}) == 1
    with use_flag(False):
        ours.save_checkpoint(root, {"n": 9}, 4, overwrite=True)
    assert bucket.keys("run/") == ["run/checkpoint_4"]


@pytest.mark.slow
def test_in_the_background(orbax: bool, bucket: Bucket) -> None:
    """Saves in the background commit in order, hold what was there when they were called, and retention follows."""
    team, root = led(team_of(2), bucket.proxy), f"{bucket.url}/run"
    assert team.call(store_jobs.save_in_background, root, orbax) == [[2, 3], [2, 3]]
    assert "checkpoint_1" not in " ".join(bucket.keys())


@pytest.mark.slow
@pytest.mark.parametrize(("orbax", "reader"), [(True, "orbax"), (True, "flax"), (False, "flax")])
def test_real_readers(orbax: bool, reader: str, bucket: Bucket, tmp_path: Path) -> None:
    """Real Orbax and real Flax, in two processes and on another mesh, read a copy of what was saved."""
    team, root = led(team_of(2), bucket.proxy), f"{bucket.url}/run"
    team.call(real_jobs.save, root, orbax, "plain", "ours")
    bucket.download("run", tmp_path)
    team.call(real_jobs.restore, str(tmp_path), orbax, "turned", reader, 1)


@pytest.mark.slow
def test_no_array_passes_through_process_0(orbax: bool, bucket: Bucket, proxies: list[Proxy]) -> None:
    """Of 16 MB over two processes, each sends its half; process 0 receives less than a hundredth of that."""
    team, root = led(team_of(2), *proxies), f"{bucket.url}/run"
    team.call(jobs.save_large, root, orbax)
    for proxy in proxies:
        sent = sum(asked.received for asked in proxy.log)
        assert 2**23 * 0.85 < sent < 2**23 * 1.05
        assert sum(asked.sent for asked in proxy.log) < 2**23 / 100
    team.call(jobs.restore_large, root)


@pytest.mark.slow
@pytest.mark.parametrize(("orbax", "victim"), [(False, 0), (True, 0), (True, 1)])
def test_a_process_that_dies(orbax: bool, victim: int, bucket: Bucket, proxies: list[Proxy]) -> None:
    """The step that was to be replaced stays whole until the commit, the others hear of it, and the next save works."""
    team, root = Team(2, outside=True), f"{bucket.url}/run"
    try:
        led(team, *proxies).call(jobs.save_small, root, orbax, 1)

        def rule(method: str, path: str) -> str:
            # Process 1 dies when it sends, process 0 when all have sent.
            at = {1: method == "PUT", 0: "ocdbt.process_1" in path and method == "GET"}[victim]
            if at or (not orbax and method == "PUT" and path.endswith("checkpoint_1")):
                team.kill(victim)
                return "refuse"
            return ""

        with proxies[victim].failing(rule):
            outcomes = team.run(store_jobs.overwrite, root, orbax, 1, 5, WAIT, timeout=30)
        assert outcomes[victim].died is not None
        assert outcomes[1 - victim].kinds[0] == "ProcessTimeoutError"
    finally:
        team.close()
    assert ours.available_steps(root) == [1]
    team = led(team_of(2), *proxies)
    assert team.call(jobs.restore_small, root) == [1, 1]
    team.call(store_jobs.overwrite, root, orbax, 1, 6, 60.0)
    assert team.call(jobs.restore_small, root) == [6, 6]
    assert len({name.rpartition(".")[2] for name in folders(bucket)}) == 1
    assert "_begun" not in " ".join(bucket.keys())


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails(orbax: bool, failing: int, bucket: Bucket, proxies: list[Proxy]) -> None:
    """All hear why, what was there stays whole, and what was sent is removed."""
    team, root = led(team_of(2), *proxies), f"{bucket.url}/run"
    team.call(jobs.save_small, root, orbax, 1)
    before = bucket.keys()
    with proxies[failing].failing(lambda method, path: "403" if method == "PUT" and "_begun" not in path else ""):
        outcomes = team.run(store_jobs.overwrite, root, orbax, 1, 5, 20.0, timeout=30)
    for outcome in outcomes:
        assert "CheckpointError" in outcome.kinds, outcome
        assert "could not be written" in outcome.error, outcome
        assert "credentials" in outcome.error, outcome
    assert bucket.keys() == before
    assert team.call(jobs.restore_small, root) == [1, 1]


@pytest.mark.parametrize("orbax", [False, pytest.param(True, marks=pytest.mark.slow)], indirect=True)
def test_what_is_published_stays(orbax: bool, bucket: Bucket) -> None:
    """Where the step before cannot be removed, all processes hear so, and nothing of the new one goes."""
    team, root = led(team_of(2), bucket.proxy), f"{bucket.url}/run"
    team.call(jobs.save_small, root, orbax, 1)
    with bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" and "checkpoint_1" in path else ""):
        outcomes = team.run(jobs.save_small, root, orbax, 2, timeout=30)
    assert all("checkpoint_2 was saved, but" in outcome.error for outcome in outcomes), outcomes
    assert team.call(jobs.restore_small, root) == [2, 2]


@pytest.mark.slow
def test_a_share_that_is_lost(orbax: bool, bucket: Bucket, proxies: list[Proxy]) -> None:
    """Process 0 misses it before it commits, says whose it is and of which leaf, and what was there stays."""
    team, root = led(team_of(2), *proxies), f"{bucket.url}/run"
    team.call(jobs.save_large, root, orbax)
    before, lost = bucket.keys(), list[str]()

    def rule(method: str, path: str) -> str:
        # Process 1 has sent its share; process 0 may still send its own, and would send a lost part again.
        if method == "HEAD" and "_begun" in path and not lost:
            new = set(bucket.keys()) - set(before)
            lost.append(next(key for key in new if re.search(r"process_1.*/manifest|/large/3", key)))
            bucket.delete(lost[0])
        return ""

    with proxies[1].failing(rule):
        outcomes = team.run(store_jobs.overwrite_large, root, orbax, timeout=30)
    for outcome in outcomes:
        assert outcome.kinds[:1] == ("StorageError",), outcome
        assert re.search(r"'large'|large/3", outcome.error), outcome
    assert bucket.keys() == before
    team.call(jobs.restore_large, root)


def test_a_commit_that_loses_late(bucket: Bucket) -> None:
    """What it leaves counts as nothing, also once the other writer has given up: it is no copy from a disk."""
    target = location_of(f"{bucket.url}/run/checkpoint_1")
    upload = uploads.Upload(target.path)
    upload.begin()
    upload.write(f"ocdbt.process_0{upload.tag}/d/1", b"")
    staged, other = Path(target.temporary_path()), f"run/checkpoint_1/{layout.BEGUN}.{2**40}.{'0' * 32}"
    temporaries.create_directory(str(staged))
    for name in ("_METADATA", layout.MANIFEST):
        (staged / name).write_bytes(b"{}")

    def rule(method: str, path: str) -> str:
        if method == "PUT" and path.endswith(layout.MANIFEST):
            bucket.put(other, b"")
        return ""

    with bucket.proxy.failing(rule), pytest.raises(ConcurrentWriteError):
        upload.publish(str(staged), new=True)
    bucket.delete(other)
    assert ours.available_steps(f"{bucket.url}/run") == []
    assert target.holds_nothing()


@pytest.mark.slow
def test_a_process_that_comes_too_late(orbax: bool, bucket: Bucket, proxies: list[Proxy]) -> None:
    """What a process sends after process 0 has given up, it removes again, and says that nothing was saved."""
    team, root = led(team_of(2), *proxies), f"{bucket.url}/run"
    team.call(jobs.save_small, root, orbax, 1)
    before, given_up = bucket.keys(), threading.Event()

    def slow(method: str, path: str) -> str:
        if method == "PUT":
            given_up.wait(20)
        return ""

    def watch(method: str, path: str) -> str:
        if method == "DELETE" and "_begun" in path:
            given_up.set()
        return ""

    with proxies[0].failing(watch), proxies[1].failing(slow):
        outcomes = team.run(store_jobs.overwrite, root, orbax, 1, 5, WAIT, timeout=40)
    assert outcomes[0].kinds[0] == "ProcessTimeoutError", outcomes
    assert "process 1 of 2 did not reach" in outcomes[1].error, outcomes
    assert bucket.keys() == before
    assert team.call(jobs.restore_small, root) == [1, 1]


@pytest.mark.slow
def test_what_dead_processes_left_is_removed_after_a_day(bucket: Bucket) -> None:
    """From a committed checkpoint only what another save's mark stands for, and none of what its own one does."""
    team, root = led(team_of(2), bucket.proxy), f"{bucket.url}/run"
    team.call(jobs.save_small, root, True, 1)
    whole = bucket.keys()
    (tag,) = {name.rpartition(".")[2] for name in folders(bucket)}
    old = int(time.time()) - 25 * 3600
    text = bucket.get("run/checkpoint_1/commit_success.txt").decode()
    bucket.put("run/checkpoint_1/commit_success.txt", text.replace(text.split(".")[-2], str(old)).encode())
    bucket.put(f"run/checkpoint_1/_begun.{old}.{tag}", b"")
    bucket.put(f"run/checkpoint_1/_begun.{old}.{'0' * 32}", b"")
    bucket.put(f"run/checkpoint_1/ocdbt.process_0.{'0' * 32}/d/1", b"stray")
    location_of(root).prepare_directory()
    assert bucket.keys() == whole
    assert team.call(jobs.restore_small, root) == [1, 1]


def test_arrays_without_a_file_are_removed_after_a_day(bucket: Bucket) -> None:
    """Those beside a file stay, because only the file tells which of them are its own."""
    team, root = led(team_of(2), bucket.proxy), f"{bucket.url}/run"
    team.call(jobs.save_small, root, False, 1)
    bucket.put(f"run/checkpoint_1_gda/_begun.{int(time.time()) - 25 * 3600}.{'0' * 32}", b"")
    before = bucket.keys()
    location_of(root).prepare_directory()
    assert bucket.keys() == before
    bucket.delete("run/checkpoint_1")
    location_of(root).prepare_directory()
    assert bucket.keys() == []
