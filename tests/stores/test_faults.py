"""Stores behind a network that fails: what is retried, what ends a call, and what is left behind."""

import itertools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, verify
from flax_ckpt_compat._core.errors import not_found
from flax_ckpt_compat._core.object_store import clouds
from flax_ckpt_compat._core.object_store.client import ConflictError
from flax_ckpt_compat._core.object_store.clouds import S3Client
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat.errors import CorruptCheckpointError, StorageError
from tests.support import s3
from tests.support.orbax_trees import load
from tests.support.orbax_trees import save as save_locally
from tests.support.s3 import Bucket, Fault
from tests.support.saves import use_flag
from tests.support.store_places import AnyBucket
from tests.support.trees import fingerprint


def state(number: int) -> dict[str, Any]:
    """A tree that tells which save it is from."""
    return {
        "w": np.random.default_rng(number).random((40, 100)),
        "small": {str(i): np.full(300, number + i, np.float32) for i in range(20)},
        "step": number,
        "name": f"save {number}",
    }


def save(bucket: Bucket, number: int, **options: Any) -> str:
    """Saves `state` in Orbax's format."""
    path = f"{bucket.url}/run/checkpoint_{number}"
    return flax_ckpt_compat.save(path, state(number), format="orbax", **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_one_request_of_ten_fails_in_a_run(seed: int, bucket: Bucket) -> None:
    """A run that saves in the background, evicts and restores ends as without faults."""
    root, manager = f"{bucket.url}/run", checkpoints.AsyncManager()
    with bucket.proxy.failing(s3.sometimes(0.1, seed)):
        for number in range(1, 6):
            checkpoints.save_checkpoint(
                root, state(number), number, keep=2, async_manager=manager, orbax_checkpointer=None
            )
        manager.wait_previous_save()
        assert checkpoints.available_steps(root) == [4, 5]
        for number in (4, 5):
            restored = checkpoints.restore_checkpoint(root, state(0), number)
            assert fingerprint(restored) == fingerprint(state(number))
    assert {asked.fault for asked in bucket.proxy.log} > {""}


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["zstd", None])
def test_a_store_that_does_not_answer(
    compression: str | None, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting ends, from whichever request on it is in vain, with an error that says so."""
    monkeypatch.setattr(clouds, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(clouds, "_TRIES", 2)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))  # so that a new client is made
    save_locally(tmp_path / "c", {"a": np.arange(60_000)}, compression)
    url, told = bucket.upload(tmp_path / "c", "run/checkpoint_1"), list[str]()
    for number in range(0, 40, 3):
        seen = itertools.count()
        with bucket.proxy.failing(lambda *_, at=number, seen=seen: "stall" if next(seen) >= at else ""):
            try:
                load(url)
                break
            except StorageError as error:
                told.append(str(error))
    assert 1 < len(told) < 14 and all("did not answer in time" in text for text in told)


def test_an_answer_that_stops_midway(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for again, which the client itself does only until an answer has begun."""
    monkeypatch.setattr(clouds, "ANSWER_SECONDS", 0.2)
    bucket.put("a", bytes(range(100)))
    for fault in ("stop", "cut"):
        faults = iter([fault])
        with bucket.proxy.failing(lambda *_, faults=faults: next(faults, "")):
            assert S3Client().read(f"{bucket.url}/a") == bytes(range(100))
        assert next(faults, None) is None


def test_a_connection_that_is_never_made(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried so many times and no more, also for a read, which has tries of its own."""
    asked = list[str]()

    def fail(host: str, *_: Any, **__: Any) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(clouds, "_TRIES", 2)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://nowhere.invalid")
    with pytest.raises(StorageError, match=r"could not be read: .*nowhere\.invalid"):
        S3Client().read(f"{bucket.url}/a")
    assert asked == ["nowhere.invalid"] * 2


def test_an_interrupt_while_a_large_file_is_sent(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the save as itself, also where the parts that were sent cannot be removed."""
    monkeypatch.setattr(clouds, "PART_BYTES", 1000)
    (tmp_path / "large").write_bytes(bytes(1500))

    class Interrupted(Meter):
        def add(self, *_: Any) -> None:
            raise KeyboardInterrupt

    with (
        bucket.proxy.failing(lambda method, path: "403" if method == "DELETE" else ""),
        pytest.raises(KeyboardInterrupt),
    ):
        S3Client().put(f"{bucket.url}/large", tmp_path / "large", meter=Interrupted())


def test_large_bytes_are_sent_in_parts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """As chunks of a ``_gda`` folder are, which come from memory."""
    monkeypatch.setattr(clouds, "PART_BYTES", 5 * 2**20)  # the least that S3 takes
    data = np.random.default_rng(0).bytes(11 * 2**20 + 1)
    S3Client().put(f"{bucket.url}/chunk", data)
    assert bucket.get("chunk") == data


def test_the_last_answer_about_a_large_object_is_lost(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload is unknown to the store when the client asks again: what was to be written is there."""
    monkeypatch.setattr(clouds, "PART_BYTES", 5 * 2**20)
    data, send = np.random.default_rng(0).bytes(6 * 2**20), S3Client._send

    def answer(store: S3Client, url: str, operation: str, *version: Any, **arguments: Any) -> Any:
        found = send(store, url, operation, *version, **arguments)
        if operation == "complete_multipart_upload":
            raise not_found(url)
        return found

    monkeypatch.setattr(S3Client, "_send", answer)
    assert S3Client().put(f"{bucket.url}/large", data)
    assert bucket.get("large") == data


@pytest.mark.parametrize("nbytes", [10, 1500], ids=["whole", "in parts"])
def test_an_object_that_is_removed_before_it_is_replaced(
    nbytes: int, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 answers 404 to a condition on an object that is gone: another writer was there."""
    monkeypatch.setattr(clouds, "PART_BYTES", 1000)
    (tmp_path / "file").write_bytes(bytes(nbytes))

    send = S3Client._send

    def missing(store: S3Client, url: str, operation: str, *version: Any, **arguments: Any) -> Any:
        if operation == "complete_multipart_upload":  # of which moto ignores the condition
            raise not_found(url)
        return send(store, url, operation, *version, **arguments)

    monkeypatch.setattr(S3Client, "_send", missing)
    with pytest.raises(ConflictError):
        S3Client().put(f"{bucket.url}/file", tmp_path / "file", '"00"')


def test_an_object_that_is_lost_while_it_is_read(bucket: Bucket) -> None:
    """A leaf whose object has gone since the opening is named."""
    url = save(bucket, 1)
    with flax_ckpt_compat.open_checkpoint(url) as opened:
        for key in bucket.keys("run/checkpoint_1/d/"):
            bucket.delete(key)
        with pytest.raises(CorruptCheckpointError, match="'w'"):
            opened.read("w")


def test_a_removal_whose_answer_is_lost_stays_one(bucket: Bucket) -> None:
    """The commit file is deleted, and the answer does not come: the newer step that was replaced is not the latest."""
    save(bucket, 9)
    lost = iter([True])

    def rule(method: str, path: str) -> s3.Fault:
        return "lose" if method == "DELETE" and "commit_success" in path and next(lost, False) else ""

    with bucket.proxy.failing(rule):
        checkpoints.save_checkpoint(f"{bucket.url}/run", state(5), 5, overwrite=True)
    assert next(lost, False) is False
    assert checkpoints.latest_checkpoint(f"{bucket.url}/run").endswith("/checkpoint_5")
    assert load(f"{bucket.url}/run/checkpoint_5")["step"] == 5


_TARGET = {"a": np.zeros(40_000), "n": 0}
_REFUSED = "403"  # which is not tried again


def _restore(url: str) -> int:
    restored = checkpoints.restore_checkpoint(url, _TARGET)
    assert np.all(restored["a"] == restored["n"])
    return int(restored["n"])


def _latest(url: str) -> int:
    return int(str(checkpoints.latest_checkpoint(url)).rpartition("_")[2])


def _list_steps(url: str) -> int:
    assert checkpoints.available_steps(url) == [1, 2, 3]
    return 3


def _verify(url: str) -> int:
    found = verify(f"{url}/checkpoint_3").checkpoints
    assert not any(one.state == "damaged" for one in found), found
    return 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "look"),
    [
        *[(fault, _restore) for fault in ("cut", _REFUSED, "refuse", "500")],
        *[("cut", look) for look in (_latest, _list_steps)],
        (_REFUSED, _verify),
    ],
)
def test_each_request_fails_once(any_bucket: AnyBucket, flag: bool, fault: Fault, look: Callable[[str], int]) -> None:
    """It is tried again, or done without; what the store refuses is a StorageError: no target, no older step, no word
    of damage."""
    url = f"{any_bucket.url}/run"
    with use_flag(flag):
        for step in (1, 2, 3):
            checkpoints.save_checkpoint(url, {"a": np.full(40_000, float(step)), "n": step}, step, keep=3)
        any_bucket.proxy.log.clear()
        assert look(url) == 3
        for at in range(len(any_bucket.proxy.log)):
            asked = iter(range(1000))
            with any_bucket.proxy.failing(lambda *_, at=at, asked=asked: fault if next(asked) == at else ""):
                try:
                    assert look(url) == 3, at
                except StorageError:
                    assert fault == _REFUSED, at
