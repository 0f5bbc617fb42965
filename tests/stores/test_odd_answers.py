"""What stores and what lies before them rarely say, and what the program itself raises meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat
from flax_ckpt_compat._core.object_store import client, gs
from flax_ckpt_compat.errors import StorageError
from tests.support.s3 import Answer, Bucket
from tests.support.store_places import AnyBucket

XML = [("Content-Type", "application/xml")]


def answering(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Answer | None]) -> None:
    """Has the store give these answers, and its own where there is none."""
    store = bucket.proxy.store
    monkeypatch.setattr(bucket.proxy, "store", lambda *request: answer(*request) or store(*request))


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_a_conflict_of_conditions_is_tried_again(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, format: Any) -> None:
    """S3 answers 409 where conditional writes of one key meet: what was to be saved is there afterwards."""
    left = [409, 409]

    def conflict(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer | None:
        del path, body
        if method != "PUT" or not {"if-none-match", "if-match"} & {name.lower() for name in headers} or not left:
            return None
        code = b"<Error><Code>ConditionalRequestConflict</Code><Message>Meanwhile.</Message></Error>"
        return left.pop(), XML, code

    answering(bucket, monkeypatch, conflict)
    flax_ckpt_compat.save(f"{bucket.url}/run", {"a": 1}, step=1, format=format)
    assert left == []
    assert flax_ckpt_compat.restore(f"{bucket.url}/run", {"a": 0}) == {"a": 1}


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_an_answer_that_is_not_a_store_s(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, format: Any) -> None:
    """A proxy's page with status 200: nothing counts as written, and the error does not tell of a missing bucket."""
    page = 200, [("Content-Type", "text/html")], b"<html>Log in</html>"
    answering(bucket, monkeypatch, lambda method, *_: page if method == "PUT" else None)
    with pytest.raises(StorageError, match="this is not an answer of a store: check the proxy"):
        flax_ckpt_compat.save(f"{bucket.url}/run", {"a": 1}, step=1, format=format)
    assert bucket.keys() == []


@pytest.mark.parametrize("format", [pytest.param("msgpack", marks=pytest.mark.slow), "orbax"])
def test_expired_credentials_make_no_checkpoint_foreign(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, format: Any
) -> None:
    """Whichever read before an overwrite is the first to be refused: nobody is told to remove the checkpoint there."""
    url, code = f"{bucket.url}/run", b"<Error><Code>ExpiredToken</Code><Message>Expired.</Message></Error>"
    flax_ckpt_compat.save(url, {"a": 1}, step=1, format=format)
    left = [0]

    def expire(*_: Any) -> Answer | None:
        left[0] -= 1
        return None if left[0] >= 0 else (400, XML, code)

    answering(bucket, monkeypatch, expire)
    for number in range(8 if format == "msgpack" else 5):
        left[0] = number
        with pytest.raises(StorageError):
            flax_ckpt_compat.save(url, {"a": 2}, step=1, format=format, overwrite=True)
    left[0] = 10**6
    assert flax_ckpt_compat.restore(url, {"a": 0}) == {"a": 1}


@pytest.mark.parametrize(("format", "whole"), [("msgpack", 0), ("orbax", 3)])
def test_bodies_that_end_too_early(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, format: Any, whole: int) -> None:
    """Half of what was asked for, as a proxy passes it on: the error tells of the network, not of a missing object."""
    url, store, answered = f"{bucket.url}/run", bucket.proxy.store, [0]
    flax_ckpt_compat.save(url, {"a": np.arange(5)}, step=1, format=format)

    def shorten(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer | None:
        if method != "GET" or "list-type" in path:
            return None
        status, found, content = store(method, path, headers, body)
        answered[0] += 1
        if answered[0] <= whole:
            return status, found, content
        headers_left = [(name, value) for name, value in found if name.lower() != "content-length"]
        return status, headers_left, content[: len(content) // 2]

    answering(bucket, monkeypatch, shorten)
    with pytest.raises(StorageError, match="the answer has fewer bytes than the object; check the network"):
        flax_ckpt_compat.restore(url, {"a": np.zeros(5, int)}, step=1)


@contextmanager
def raising_timeout(after: float) -> Iterator[None]:
    """Within it a signal handler of the program raises TimeoutError soon."""

    def handler(*_: Any) -> None:
        raise TimeoutError("the program's own")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


CALLS = {
    "client.read": lambda url: client.read(f"{url}/a"),
    "latest": flax_ckpt_compat.checkpoints.latest_checkpoint,
    "msgpack": lambda url: flax_ckpt_compat.save(url, {"a": 1}, step=1, format="msgpack"),
    "orbax": lambda url: flax_ckpt_compat.save(url, {"a": 1}, step=1, format="orbax"),
    "restore": lambda url: flax_ckpt_compat.restore(url, {"a": 1}),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_timeout_of_the_program_reaches_it(any_bucket: AnyBucket, call: str) -> None:
    """A handler's TimeoutError, while the store does not answer, is neither tried again nor taken for the store's."""
    any_bucket.proxy.log.clear()
    asked: list[str] = []

    def stall(method: str, path: str) -> str:
        if not asked:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGALRM)).start()
        asked.append(f"{method} {path}")
        return "stall"

    with (
        raising_timeout(60),
        any_bucket.proxy.failing(stall),
        pytest.raises(TimeoutError, match="program's own") as told,
    ):
        CALLS[call](f"{any_bucket.url}/run")
    assert type(told.value) is TimeoutError
    assert len(set(asked)) == len(asked)  # nothing a second time


def test_redirects_do_not_carry_the_token() -> None:
    """Another server, to which the JSON API's answer leads, is not sent the user's token; the first one is."""
    seen: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Authorization")))
            self.send_response(200 if self.path == "/other" else 302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/other")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        request: urllib.request.Request = gs._api_request(f"http://127.0.0.1:{server.server_address[1]}/o", "secret")
        assert gs._send(request, 10) == (200, {})
    finally:
        server.shutdown()
        server.server_close()
    assert seen == [("/o", "Bearer secret"), ("/other", None)]
