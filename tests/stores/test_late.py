"""Stores that execute a request twice, late, or never: nothing that was saved is lost, and no wait is endless."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat._core.object_store import client, replace_directory, retrying, uploads, writer_markers
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


METADATA, DATA = "_METADATA", "d/0123456789abcdef0123456789abcdef"


def _settle(bucket: AnyBucket, staged: Path, at_look: Callable[[int], None]) -> int:
    """Uploads two files, while something happens before each look at the folder; returns how many looks it took."""
    for name in (METADATA, DATA):
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_bytes(b"new " + name.encode())
    bucket.put(f"run/c/{METADATA}", b"old")
    lease = writer_markers.WriteLease(f"{bucket.url}/run/c")
    look, looks = lease.list_others, list[int]()

    def look_later() -> set[str]:
        looks.append(len(looks))
        at_look(looks[-1])
        return look()

    lease.list_others = look_later  # type: ignore[method-assign]
    bucket.put("run/c/kept", b"kept")
    versions = replace_directory.shared_versions(lease, [METADATA])
    replace_directory.upload_all(lease, str(staged), [METADATA, DATA], versions, ["kept"])
    assert versions.keys() == {METADATA}  # the others have names of their own, and need no condition
    there = {key.removeprefix("run/c/"): bucket.get(key) for key in bucket.keys("run/c/")}
    there.pop(lease.marker)
    assert there == {"kept": b"kept", **{name: b"new " + name.encode() for name in (METADATA, DATA)}}
    return len(looks)


@pytest.mark.parametrize("change", ["nothing", "a stray", METADATA, DATA])
def test_what_late_requests_do_to_an_upload(change: str, any_bucket: AnyBucket, tmp_path: Path) -> None:
    """An object that comes is removed, one that goes is uploaded again: in one more round, as the next look shows."""

    def at_look(number: int) -> None:
        if number or change == "nothing":
            return
        if change == "a stray":
            any_bucket.put("run/c/stray", b"of an aborted writer")
        else:
            any_bucket.delete(f"run/c/{change}")

    assert _settle(any_bucket, tmp_path, at_look) == (1 if change == "nothing" else 2)


def test_another_version_is_replaced_once_it_is_known(
    any_bucket: AnyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of that name came late, after the versions were looked up: its version is looked up again."""
    upload, rounds = uploads.upload, list[list[str]]()

    def after_a_late_write(directory: str, url: str, names: Any, *rest: Any) -> list[str]:
        if not rounds:
            any_bucket.put(f"run/c/{METADATA}", b"of an aborted writer")
        rounds.append(sorted(names))
        return upload(directory, url, names, *rest)

    monkeypatch.setattr(uploads, "upload", after_a_late_write)
    assert _settle(any_bucket, tmp_path, lambda _: None) == 2
    assert rounds == [[METADATA, DATA], [METADATA]]


def test_a_folder_that_never_settles(any_bucket: AnyBucket, tmp_path: Path) -> None:
    """Another program writes to it: nothing is committed."""
    with pytest.raises(errors.ConcurrentWriteError):
        _settle(any_bucket, tmp_path, lambda number: any_bucket.put(f"run/c/stray{number}", b""))
