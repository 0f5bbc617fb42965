"""Bytes that change on their way to or from a store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from flax_ckpt_compat import restore, save
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import retrying
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
def flipping_uploads(proxy: Proxy, times: int) -> Iterator[list[str]]:
    """A proxy that changes this many large uploads, before a store that compares their SHA-256, as S3 does."""
    before, done = proxy.forward, list[str]()

    def forward(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        sent = {name.lower(): value for name, value in headers.items()}.get("x-amz-content-sha256")
        if method == "PUT" and len(body) > 100_000 and len(done) < times:
            done.append(path)
            body = flipped(body)
        if method == "PUT" and hashlib.sha256(body).hexdigest() != sent:
            return 400, [("Content-Type", "application/xml")], MISMATCH
        return before(method, path, headers, body)

    proxy.forward = forward  # type: ignore[method-assign]
    try:
        yield done
    finally:
        del proxy.forward


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_s3_refuses_changed_uploads_and_they_are_sent_again(bucket: Bucket, format: str) -> None:
    """Each upload is signed with its SHA-256; what S3 refuses for that is a failure of the network."""
    with flipping_uploads(bucket.proxy, times=2) as changed:
        save(f"{bucket.url}/c", TREE, format=format)
    assert len(changed) == 2
    assert fingerprint(restore(f"{bucket.url}/c", None)) == fingerprint(TREE)


def test_uploads_that_always_change_are_an_error(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is saved, and the message says what happened."""
    monkeypatch.setattr(retrying, "_FIRST_PAUSE", 0.01)
    with (
        flipping_uploads(bucket.proxy, times=99),
        pytest.raises(StorageError, match=r"SHA256Mismatch.*changed on their way"),
    ):
        save(f"{bucket.url}/c", TREE, format="msgpack")
    assert bucket.keys() == []
