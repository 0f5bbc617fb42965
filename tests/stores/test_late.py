"""Stores that execute a request twice, late, or never: nothing that was saved is lost, and no wait is endless."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.object_store import client, retrying, uploads
from flax_ckpt_compat._core.object_store import gs as gs_scheme
from tests.stores.test_faults import from_request, state
from tests.support import s3
from tests.support.store_places import BY_TURNS, AnyBucket
from tests.support.trees import fingerprint

CHANGES = ("PUT", "POST", "DELETE")
FORMATS = ("msgpack", "orbax")
Request = tuple[str, str, dict[str, str], bytes]


@contextmanager
def recorded(bucket: AnyBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """Lists the requests within it that change the store."""
    changes: list[Request] = []
    forward = bucket.proxy.forward

    def forward_and_record(*request: Any) -> s3.Answer:
        if request[0] in CHANGES:
            changes.append(request)
        return forward(*request)

    with monkeypatch.context() as patched:
        patched.setattr(bucket.proxy, "forward", forward_and_record)
        yield changes


def put_back(bucket: AnyBucket, contents: dict[str, bytes]) -> None:
    """Restores what was changed in a bucket, and only that: objects keep their versions."""
    there = {key: bucket.get(key) for key in bucket.keys("run/")}
    for key in there.keys() - contents:
        bucket.delete(key)
    for key, content in contents.items():
        if there.get(key) != content:
            bucket.put(key, content)


@pytest.mark.parametrize(
    ("any_bucket", "format", "every", "is_mapped"),
    [
        ("s3", "msgpack", 1, False),
        ("gs", "msgpack", 1, True),
        ("gs", "orbax", 6, False),
        pytest.param("s3", "msgpack", 1, True, marks=pytest.mark.slow),
        pytest.param("gs", "msgpack", 1, False, marks=pytest.mark.slow),
        *(
            pytest.param(store, "orbax", 1, is_mapped, marks=pytest.mark.slow)
            for store, is_mapped in itertools.product(("s3", "gs"), (False, True))
        ),
    ],
    indirect=["any_bucket"],
)
def test_a_request_that_is_executed_again_later(
    format: Any, every: int, is_mapped: bool, any_bucket: AnyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a save and two overwrites of one step: it stays whole, and what was saved last, after all of them."""
    root = f"{any_bucket.url}/run"
    if is_mapped:  # as large files are sent
        monkeypatch.setattr(uploads, "_MIN_MAPPED_BYTES", 0)
    with recorded(any_bucket, monkeypatch) as changes:
        for number in (1, 2, 3):
            flax_ckpt_compat.save(root, state(number), step=7, format=format, overwrite=number > 1)
    contents = {key: any_bucket.get(key) for key in any_bucket.keys("run/")}
    commits = [number for number, (_, path, *_) in enumerate(changes) if "commit_success.txt" in path]
    for number in sorted({*range(0, len(changes), every), *commits}):
        method, path, *_ = changes[number]
        any_bucket.proxy.forward(*changes[number])
        assert checkpoints.available_steps(root) == [7], (number, method, path)
        restored = fingerprint(checkpoints.restore_checkpoint(root, None))
        assert restored == fingerprint(state(3)), (number, method, path)
        put_back(any_bucket, contents)


@pytest.mark.parametrize("format", FORMATS)
def test_a_removal_that_is_executed_again_later(
    format: Any, any_bucket: AnyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was removed, and saved again since, stays whole."""
    root = f"{any_bucket.url}/run"
    with recorded(any_bucket, monkeypatch) as changes:
        flax_ckpt_compat.save(root, state(1), step=1, format=format)
        flax_ckpt_compat.save(root, state(2), step=2, format=format, keep=1)
    flax_ckpt_compat.save(root, state(3), step=1, format=format, overwrite=True)
    deletions = [request for request in changes if request[0] == "DELETE"]
    assert deletions
    for request in deletions:
        any_bucket.proxy.forward(*request)
        assert checkpoints.available_steps(root) == [1, 2], request[1]
        assert fingerprint(flax_ckpt_compat.restore(root, step=1)) == fingerprint(state(3)), request[1]


def test_a_removal_in_mid_overwrite_whose_answer_is_lost(
    any_bucket: AnyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again, it finds nothing to remove; what was replaced still goes."""
    root, delete_version = f"{any_bucket.url}/run", client.delete_version
    deleted = list[bool]()

    def delete_twice(url: str, there: bytes) -> bool:
        assert delete_version(url, there)
        deleted.append(delete_version(url, there))
        return deleted[-1]

    flax_ckpt_compat.save(root, state(1), step=1, format="orbax")
    before = any_bucket.keys("run/")
    monkeypatch.setattr(client, "delete_version", delete_twice)
    flax_ckpt_compat.save(root, state(2), step=1, format="orbax", overwrite=True)
    assert deleted == [False]
    assert fingerprint(flax_ckpt_compat.restore(root, step=1)) == fingerprint(state(2))
    assert len(any_bucket.keys("run/")) == len(before)


def save_until_it_succeeds(root: str, tree: Any, step: int, format: Any) -> None:
    """Saves again where late requests look like another writer, and keeps two steps."""
    for _ in range(6):
        try:
            flax_ckpt_compat.save(root, tree, step=step, format=format, overwrite=True, keep=2)
            return
        except errors.ConcurrentWriteError:
            pass
    raise AssertionError("it never succeeded")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
@pytest.mark.parametrize(("any_bucket", "format"), BY_TURNS, indirect=["any_bucket"])
def test_a_run_with_requests_that_come_late(format: Any, seed: int, any_bucket: AnyBucket) -> None:
    """Steps that a run keeps are what it saved last, also after requests of evicted and replaced ones are executed."""
    root, proxy = f"{any_bucket.url}/run", any_bucket.proxy
    saved: dict[int, list[int]] = {}
    faults = s3.sometimes(0.5, seed, (*s3.LATE, "lose"))
    with proxy.failing(lambda method, path: faults(method, path) if method in CHANGES else ""):
        for number, step in enumerate((1, 2, 2, 3, 4)):
            save_until_it_succeeds(root, state(number), step, format)
            saved.setdefault(step, []).append(number)
        proxy.wait_for_late()
    assert {asked.fault for asked in proxy.log} & {*s3.LATE}
    assert checkpoints.latest_checkpoint(root) == f"{root}/checkpoint_4"
    for step, numbers in saved.items():
        kept = numbers[-1:] if step in (3, 4) else numbers
        try:
            restored = fingerprint(flax_ckpt_compat.restore(root, step=step))
        except errors.CheckpointError:
            assert step in (1, 2)  # evicted
        else:
            assert restored in [fingerprint(state(number)) for number in kept]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("format", FORMATS)
def test_a_store_that_is_busy_and_late(format: Any, seed: int, any_bucket: AnyBucket) -> None:
    """It answers one request of seven with 429, and executes half of the changes twice: the run keeps its steps."""
    root, proxy = f"{any_bucket.url}/run", any_bucket.proxy
    busy, late = s3.sometimes(0.15, seed, ("429",)), s3.sometimes(0.5, seed + 100, ("again",))
    with proxy.failing(lambda method, path: busy(method, path) or (late(method, path) if method in CHANGES else "")):
        for step in range(1, 6):
            save_until_it_succeeds(root, state(step), step, format)
        proxy.wait_for_late()
    assert {asked.fault for asked in proxy.log} >= {"429", "again"}
    assert fingerprint(checkpoints.restore_checkpoint(root, None)) == fingerprint(state(5))
    assert checkpoints.available_steps(root)[-1] == 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("any_bucket", "format", "firsts"),
    [
        pytest.param("gs", "msgpack", (4,), id="gs-msgpack"),
        pytest.param("s3", "orbax", (24,), id="s3-orbax"),
        *(
            pytest.param(store, format, range(0, 200, 3), marks=pytest.mark.slow, id=f"{store}-{format}-sweep")
            for store, format in itertools.product(("s3", "gs"), FORMATS)
        ),
    ],
    indirect=["any_bucket"],
)
def test_a_save_without_answers(
    format: Any, firsts: Sequence[int], any_bucket: AnyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, whichever request is the first without an answer, and names the reason; old or new step are whole."""
    root = f"{any_bucket.url}/run"
    flax_ckpt_compat.save(root, state(1), step=1, format=format)
    flax_ckpt_compat.save(root, state(2), step=2, format=format)
    for first in firsts:
        began, ended = time.monotonic(), False
        with any_bucket.proxy.failing(from_request(first, "stall")), monkeypatch.context() as patched:
            for module in (retrying, uploads, gs_scheme):
                patched.setattr(module, "_TIMEOUT", 0.4)
            for name, value in (("_MIN_RATE", 2**40), ("_ATTEMPTS", 2), ("_FIRST_PAUSE", 0.01)):
                patched.setattr(retrying, name, value)
            try:
                flax_ckpt_compat.save(root, state(3), step=2, format=format, overwrite=True, keep=1)
                ended = True
            except errors.CheckpointError as error:
                assert "did not answer in time" in str(error)
        assert time.monotonic() - began < 60
        assert checkpoints.latest_checkpoint(root) == f"{root}/checkpoint_2"
        restored = fingerprint(checkpoints.restore_checkpoint(root, None))
        assert restored in [fingerprint(state(3)), *([] if ended else [fingerprint(state(2))])]
        if ended:
            return
    assert len(firsts) == 1, "it never succeeded"


def test_a_new_context_within_a_conditional_write(any_bucket: AnyBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout of another thread brings it: the condition holds all the same, and a newer object stays."""
    url, as_array = f"{any_bucket.url}/run/checkpoint_1", uploads._as_array
    client.write(url, b"old")
    there = client.version(url)

    def later(*arguments: Any) -> Any:
        with pytest.raises(TimeoutError), retrying.replaced_context_after_failure():
            raise TimeoutError
        client.write(url, b"newer")
        return as_array(*arguments)

    monkeypatch.setattr(uploads, "_as_array", later)
    assert not uploads.write_if(url, bytes(2 * 2**20), there)
    assert client.read(url) == b"newer"
