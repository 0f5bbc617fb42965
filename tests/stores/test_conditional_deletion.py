"""Deletions of one version of an object of s3://: what botocore cannot ask for is deleted as without it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints
from flax_ckpt_compat._core.object_store import client, retrying, s3_requests
from flax_ckpt_compat._core.object_store.writer_markers import WriteLease
from flax_ckpt_compat.errors import StorageError
from tests.stores.test_faults import state
from tests.support.s3 import Answer, Bucket
from tests.support.trees import fingerprint

XML = [("Content-Type", "application/xml")]


@pytest.fixture
def deletions(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The condition of each deletion that the store gets, "" for none."""
    store, seen = bucket.proxy.store, list[str]()

    def record(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if method == "DELETE":
            seen.append({name.lower(): value for name, value in headers.items()}.get("if-match", ""))
        return store(method, path, headers, body)

    monkeypatch.setattr(bucket.proxy, "store", record)
    s3_requests._client.cache_clear()
    yield seen
    s3_requests._client.cache_clear()


def written(bucket: Bucket) -> tuple[str, bytes]:
    """An object's URL, and its version."""
    url = f"{bucket.url}/run/c"
    client.write(url, b"first")
    return url, client.version(url)


def test_a_version_that_was_replaced_stays(bucket: Bucket, deletions: list[str]) -> None:
    """Nothing but the version that was named goes; of what is missing nothing goes either."""
    url, first = written(bucket)
    client.write(url, b"second")
    assert not client.delete_version(url, first)
    assert bucket.get("run/c") == b"second"
    assert client.delete_version(url, client.version(url))
    assert bucket.keys() == []
    assert not client.delete_version(url, first)
    assert len(deletions) == 3
    assert all(deletions)
    client.write(url, b"third")
    assert client.delete_version(url, b"\1another store's")  # of which S3 knows nothing
    assert bucket.keys() == []
    assert deletions[3:] == [""]


def test_without_botocore(bucket: Bucket, deletions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves remove as much as with it, without conditions, and ask for no versions."""
    monkeypatch.setattr(s3_requests, "is_installed", lambda: False)
    for step in (1, 2):
        flax_ckpt_compat.save(f"{bucket.url}/run", state(step), step=step, format="orbax", keep=1)
    assert checkpoints.available_steps(f"{bucket.url}/run") == [2]
    assert not bucket.keys("run/checkpoint_1/")
    assert deletions
    assert not any(deletions)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"AWS_PROFILE": "missing"}, "profile"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}, "credentials"),
        ({"HTTP_PROXY": "http://127.0.0.1:9"}, "proxy"),
    ],
)
def test_what_botocore_cannot_do_here(
    variables: dict[str, str],
    why: str,
    bucket: Bucket,
    deletions: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TensorStore reaches the store: it deletes without a condition, which is logged; botocore is not tried again."""
    url, version = written(bucket)
    monkeypatch.setattr(retrying, "context", functools.partial(lambda found: found, retrying.context()))
    for name, value in {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"), **variables}.items():
        monkeypatch.setenv(name, value)
    if why == "proxy":  # that only botocore takes
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(retrying, "_FIRST_PAUSE", 0.01)
    with caplog.at_level("INFO", "flax_ckpt_compat"):
        assert client.delete_version(url, version)
        client.write(url, b"second")
        assert client.delete_version(url, version)
    assert bucket.keys() == []
    assert deletions == ["", ""]
    told = [record.getMessage() for record in caplog.records if "without a condition" in record.getMessage()]
    assert len(told) == 1
    assert why in told[0].lower()


@pytest.mark.parametrize(
    ("status", "code", "again"),
    [(501, "NotImplemented", False), (400, "InvalidArgument", True), (403, "AccessDenied", True)],
)
def test_a_store_that_refuses_conditions(
    status: int, code: str, again: bool, bucket: Bucket, deletions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked without them; one that does not know them is not asked with them again."""
    url, version = written(bucket)
    store = bucket.proxy.store

    def refuse(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        answer = store("HEAD" if method == "DELETE" and "If-Match" in headers else method, path, headers, body)
        if method != "DELETE" or "If-Match" not in headers:
            return answer
        deletions.append("refused")
        return status, XML, f"<Error><Code>{code}</Code><Message>No.</Message></Error>".encode()

    monkeypatch.setattr(bucket.proxy, "store", refuse)
    for _ in range(2):
        assert client.delete_version(url, version)
        assert bucket.keys() == []
        client.write(url, b"second")
    assert deletions == ["refused", "", *(["refused"] if again else []), ""]


@pytest.mark.parametrize(("status", "code"), [(409, "ConditionalRequestConflict"), (429, "TooManyRequests")])
def test_a_store_that_is_busy(
    status: int, code: str, bucket: Bucket, deletions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again, with the condition."""
    monkeypatch.setattr(retrying, "_FIRST_PAUSE", 0.01)
    url, version = written(bucket)
    store, busy = bucket.proxy.store, [True, True]

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if method == "DELETE" and busy:
            busy.pop()
            return status, XML, f"<Error><Code>{code}</Code><Message>Later.</Message></Error>".encode()
        return store(method, path, headers, body)

    monkeypatch.setattr(bucket.proxy, "store", answer)
    assert client.delete_version(url, version)
    assert bucket.keys() == []
    assert not busy
    assert len(deletions) == 1
    assert all(deletions)


def test_credentials_that_have_expired(
    bucket: Bucket, deletions: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The request is sent once more, with those that the file has by then."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    file.write_text("[default]\naws_access_key_id = FIRST\naws_secret_access_key = secret\n")
    url, version = written(bucket)
    store = bucket.proxy.store

    def expire(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if "FIRST" in str(headers):
            file.write_text("[default]\naws_access_key_id = SECOND\naws_secret_access_key = secret\n")
            return 400, XML, b"<Error><Code>ExpiredToken</Code><Message>Old.</Message></Error>"
        return store(method, path, headers, body)

    monkeypatch.setattr(bucket.proxy, "store", expire)
    assert client.delete_version(url, version)
    assert bucket.keys() == []
    assert len(deletions) == 1
    assert all(deletions)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", "could not be deleted"),
        pytest.param("stall", "did not answer in time", marks=pytest.mark.slow),
    ],
)
def test_a_store_that_fails(
    fault: str, said: str, bucket: Bucket, deletions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, and in the end an error; what could not be deleted by version is not deleted without."""
    monkeypatch.setattr(retrying, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retrying, "_TIMEOUT", 0.5)
    url, version = written(bucket)
    assert not client.delete_version(url, b"\0" + b'"another"')  # it has answered
    failing: list[Any] = []

    def rule(method: str, _path: str) -> str:
        failing.append(method)
        return fault if method == "DELETE" else ""

    with bucket.proxy.failing(rule), pytest.raises(StorageError, match=said):
        client.delete_version(url, version)
    assert failing.count("DELETE") == 4
    assert bucket.keys() == ["run/c"]
    assert len(deletions) == 1  # the first, which named another version


def test_the_same_tree_saved_again_has_other_bytes(bucket: Bucket) -> None:
    """No object with a name of both is the same in two saves of one tree, and every reader sees the same tree."""
    tree = {"a": jnp.arange(6.0), "text": "word", "none": None}  # all files there can be
    contents = list[set[bytes]]()
    for step in (1, 2):
        flax_ckpt_compat.save(f"{bucket.url}/run", tree, step=step, format="orbax")
        keys = [key for key in bucket.keys(f"run/checkpoint_{step}/") if "/d/" not in key]  # which have random names
        contents.append({bucket.get(key) for key in keys})
        assert len(contents[-1]) == len(keys) == 8
        assert flax_ckpt_compat.verify(f"{bucket.url}/run", step=step).ok
    assert not contents[0] & contents[1]
    restored = flax_ckpt_compat.restore(f"{bucket.url}/run")
    assert fingerprint(restored) == fingerprint({"a": np.arange(6, dtype=np.float32), "text": "word", "none": None})


def test_what_a_writer_that_lost_leaves_is_deleted_by_version(bucket: Bucket, deletions: list[str]) -> None:
    """Its files with names of each save, too: the next writer may just have written them anew."""
    lease = WriteLease(f"{bucket.url}/run/c")
    lease.release()
    deletions.clear()
    for name in ("_METADATA", "manifest.ocdbt"):
        client.write(f"{lease.url}/{name}", name.encode())
    lease.remove_abandoned(["_METADATA", "manifest.ocdbt", "_sharding"])
    assert bucket.keys() == []
    assert len(deletions) == 2
    assert all(deletions)


def test_a_writer_clears_all_but_what_it_keeps_and_its_marker(bucket: Bucket) -> None:
    """What other processes of its save have uploaded stays, of whatever name; all else goes, commit files too."""
    url = f"{bucket.url}/run/c"
    for name in ("_METADATA", "manifest.ocdbt", "d/old", "d/new", "commit_success.txt"):
        client.write(f"{url}/{name}", b"x")
    lease = WriteLease(url)
    lease.clear(keep=["d/new", "manifest.ocdbt"])
    assert bucket.keys() == sorted(f"run/c/{name}" for name in ("d/new", "manifest.ocdbt", lease.marker))
    lease.release()
    assert bucket.keys() == ["run/c/d/new", "run/c/manifest.ocdbt"]
