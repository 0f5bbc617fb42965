"""The stores of the session, a bucket for each test, and a network that fails where a test asks for it."""

import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import az, gs, s3
from tests.support.az import AzBucket, AzProxy
from tests.support.gs import GsBucket, GsProxy
from tests.support.s3 import Bucket, Proxy
from tests.support.shelf import Shelf, new_shelf
from tests.support.store_places import AnyBucket


@pytest.hookimpl(tryfirst=True)  # before those that are marked are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By default a test of any store runs in one, by turns; the slow tests are those in the other."""
    for item in items:
        spec = getattr(item, "callspec", None)
        of_fixture = spec is not None and "any_bucket" in spec.params and not _chooses_store(item)
        if of_fixture and spec.params["any_bucket"] != ("s3", "gs")[zlib.crc32(item.originalname.encode()) % 2]:
            item.add_marker(pytest.mark.slow)


def _chooses_store(item: pytest.Item) -> bool:
    return any("any_bucket" in str(mark.args[0]) for mark in item.iter_markers("parametrize"))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Proxy]:
    """The proxy before a store."""
    with s3.serving() as proxy:
        yield proxy


def _empty(kind: Any, proxy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket of a kind, to which the environment leads the library through a proxy without faults."""
    for name, value in kind.environment(proxy).items():
        monkeypatch.setenv(name, value)
    proxy.log.clear()
    yield kind.new_bucket(proxy)
    proxy.rule = lambda method, path: ""


@pytest.fixture
def bucket(s3_server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket of s3://."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    yield from _empty(s3, s3_server, monkeypatch)


@pytest.fixture(scope="session")
def gs_server() -> Iterator[GsProxy]:
    """The proxy before a gs:// server; TensorStore reads the variables once, so all tests share it."""
    why = gs.why_not()
    if why is not None:
        pytest.skip(why)
    with gs.serving() as proxy:
        yield proxy


@pytest.fixture
def gs_bucket(gs_server: GsProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[GsBucket]:
    """An empty bucket of gs://."""
    yield from _empty(gs, gs_server, monkeypatch)


@pytest.fixture(scope="session")
def az_server() -> Iterator[AzProxy]:
    """Azurite, and the proxy before it."""
    why = az.why_not()
    if why is not None:
        pytest.skip(why)
    with az.serving() as server:
        yield server


@pytest.fixture
def az_bucket(az_server: AzProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzBucket]:
    """An empty container of az://."""
    yield from _empty(az, az_server, monkeypatch)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """An empty place of a path class that is registered with epath."""
    return new_shelf(f"shelf-{uuid.uuid4().hex[:12]}", tmp_path / "shelf")


@pytest.fixture(params=["s3", "gs"])
def any_bucket(request: pytest.FixtureRequest) -> AnyBucket:
    """An empty bucket of each kind of store; tests of their own ask for the other kinds."""
    fixtures = {"s3": "bucket", "gs": "gs_bucket", "az": "az_bucket", "shelf": "shelf"}
    found: AnyBucket = request.getfixturevalue(fixtures[request.param])
    return found
