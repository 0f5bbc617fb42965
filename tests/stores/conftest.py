"""The S3 server of the session, a bucket for each test, and a network that fails where a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import s3
from tests.support.peers import version
from tests.support.s3 import Bucket, Proxy

# Older releases cannot read parts of objects, and the library says so.
collect_ignore_glob = ["test_*.py"] if version("tensorstore") < (0, 1, 86) else []


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[int, Proxy]]:
    """Port of the server, and the proxy before it."""
    with s3.serving() as served:
        yield served


@pytest.fixture
def bucket(s3_server: tuple[int, Proxy], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket, to which the environment leads the library through a proxy without faults."""
    port, proxy = s3_server
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3.environment(proxy).items():
        monkeypatch.setenv(name, value)
    proxy.log.clear()
    yield s3.new_bucket(port, proxy)
    proxy.rule = lambda method, path: ""
