"""Bytes that change on their way to or from a store."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from flax_ckpt_compat import config, restore, save
from flax_ckpt_compat._core.errors import ChecksumError, StorageError
from tests.support.gs import GsBucket
from tests.support.s3 import Answer, Bucket, Proxy
from tests.support.trees import fingerprint

# The answer of S3 to a body that is not what was signed; moto does not compare them.
MISMATCH = (
    b"<Error><Code>XAmzContentSHA256Mismatch</Code><Message>The provided 'x-amz-content-sha256' header does not match "
    b"what was computed.</Message></Error>"
)
TREE = {"w": np.arange(200_000.0), "b": np.ones(3)}


def flipped(data: bytes) -> bytes:
    """The same bytes but for one bit in the middle."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


@contextmanager
def flipping(proxy: Proxy, method: str, times: int) -> Iterator[list[str]]:
    """A proxy that changes this many large bodies of a method, before a store that compares SHA-256, as S3 does."""
    before, done = proxy.forward, list[str]()

    def passed(path: str, data: bytes) -> bytes:
        if len(data) < 100_000 or len(done) == times:
            return data
        done.append(path)
        return flipped(data)

    def forward(asked: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        signed = {name.lower(): value for name, value in headers.items()}.get("x-amz-content-sha256")
        body = passed(path, body) if asked == method != "GET" else body
        if asked == "PUT" and signed not in (None, hashlib.sha256(body).hexdigest()):
            return 400, [("Content-Type", "application/xml")], MISMATCH
        status, answered, content = before(asked, path, headers, body)
        return status, answered, passed(path, content) if asked == method == "GET" else content

    proxy.forward = forward  # type: ignore[method-assign]
    try:
        yield done
    finally:
        del proxy.forward


def test_gs_changed_uploads_are_an_error(gs_bucket: GsBucket, format: Any) -> None:
    """The store tells the CRC-32C of what arrived."""
    with (
        flipping(gs_bucket.proxy, "POST", times=1),
        pytest.raises(StorageError, match=r"were changed on their way.*overwrite=True"),
    ):
        save(f"{gs_bucket.url}/c", TREE, format=format)
    save(f"{gs_bucket.url}/c", TREE, format=format, overwrite=True)
    assert fingerprint(restore(f"{gs_bucket.url}/c", None)) == fingerprint(TREE)


@pytest.mark.slow
def test_gs_changed_downloads_are_an_error(gs_bucket: GsBucket) -> None:
    """A whole restore is compared with the CRC-32C of the store."""
    tree = {"a": np.arange(3.0e6), **TREE, "n": 3}  # more than one request
    save(f"{gs_bucket.url}/c", tree, format="msgpack")
    assert fingerprint(restore(f"{gs_bucket.url}/c", None)) == fingerprint(tree)
    changed = pytest.raises(ChecksumError, match=r"the store reports .*changed in transit")
    with flipping(gs_bucket.proxy, "GET", times=1), changed:
        restore(f"{gs_bucket.url}/c", None)
    with flipping(gs_bucket.proxy, "GET", times=1), config.override(checksums="off"):
        assert restore(f"{gs_bucket.url}/c", None)["n"] == 3


def test_s3_refuses_changed_uploads(bucket: Bucket) -> None:
    """Each upload is signed with its SHA-256: nothing is saved, and the message says what happened."""
    with flipping(bucket.proxy, "PUT", times=99), pytest.raises(StorageError, match="could not be written"):
        save(f"{bucket.url}/c", TREE, format="msgpack")
    assert bucket.keys() == []
