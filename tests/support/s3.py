"""An S3 store on loopback: moto, behind a proxy that fails as networks and stores do."""

import dataclasses
import functools
import importlib
import os
import random
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PAGE = 200  # keys in one answer; 1,000 on S3 itself
_ANSWERS = {
    "500": b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>",
    "403": b"<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>",
}
_SLOW = 0.3  # s
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
ONLY_ONE_HOP = frozenset(["connection", "transfer-encoding", "keep-alive", "server", "date"])

# One of FAULTS; or "403", denied for good; "stall", no answer; "stop", half of an answer, and no more.
Fault = str
FAULTS = ("refuse", "lose", "cut", "500", "slow")
"""
What passes when tried again.
refuse: the connection ends before the request is handed on; lose: after it was done, without an answer;
cut: in the middle of the answer; 500: the server says that it has failed; slow: the answer is late.
"""


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request, and what came of it.

    Attributes:
        method, path: of HTTP; the path with its query.
        status: of the answer; 0 where none was sent.
        sent: bytes of the answer's body.
        fault: what was done to it, or "".
        received: bytes of the request's body.
    """

    method: str
    path: str
    status: int
    sent: int
    fault: str
    received: int = 0

    @property
    def is_listing(self) -> bool:
        """Whether it asks for keys."""
        return self.method == "GET" and "list-type=" in self.path

    @property
    def is_get(self) -> bool:
        """Whether it asks for the content of an object."""
        return self.method == "GET" and not self.is_listing


Rule = Callable[[str, str], Fault]
Answer = tuple[int, list[tuple[str, str]], bytes]  # status, headers, body


def sometimes(rate: float, seed: int) -> Rule:
    """A rule by which the share ``rate`` of all requests fails, in ways that are drawn."""
    generator, lock = random.Random(seed), threading.Lock()

    def rule(method: str, path: str) -> Fault:
        with lock:
            return generator.choice(FAULTS) if generator.random() < rate else ""

    return rule


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # else a client of many new connections tries some again after a second


class Proxy:
    """Hands requests on to a store and answers back; what it does to them is the `rule`'s to say.

    Attributes:
        store: method, path, headers and body → answer.
        rule: method and path → fault, or "" for none.
        log: of all requests since it was cleared.
        ended: set when it is closed.
    """

    def __init__(self, store: Callable[[str, str, dict[str, str], bytes], Answer]) -> None:
        self.store = store
        self.rule: Rule = lambda method, path: ""
        self.log: list[Asked] = []
        self.ended = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def refusal(self, fault: Fault) -> tuple[str, bytes] | None:
        """Content type and body of the answer that a fault is; None for other faults."""
        return ("application/xml", _ANSWERS[fault]) if fault in _ANSWERS else None

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """What the store says to a request."""
        return self.store(method, path, headers, body)

    @property
    def url(self) -> str:
        """What clients take for the server."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def failing(self, rule: Rule) -> Iterator[None]:
        """Within it, requests fail as the rule says."""
        before, self.rule = self.rule, rule
        try:
            yield
        finally:
            self.rule = before

    def close(self) -> None:
        """Ends it."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # an answer is one write

        fault: Fault = ""
        received = 0

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.received = len(body)
            self.fault = proxy.rule(self.command, self.path)
            with suppress(ConnectionError):  # the client has gone
                self._answer(body)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

        def _answer(self, body: bytes) -> None:
            if self.fault == "refuse":
                self._note(0, 0)
                self._hang_up()
            elif refusal := proxy.refusal(self.fault):
                self._send(int(self.fault), [("Content-Type", refusal[0])], refusal[1])
            elif self.fault == "stall":
                proxy.ended.wait()
                self._hang_up()
            else:
                if self.fault == "slow":
                    time.sleep(_SLOW)
                self._pass_back(*proxy.forward(self.command, self.path, dict(self.headers), body))

        def _pass_back(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            if self.fault == "lose" or (self.fault == "cut" and not content):
                self._note(0, 0)
                self._hang_up()
            else:
                self._send(status, headers, content)

        def _send(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            sent = content[: len(content) // 2] if self.fault in ("cut", "stop") else content
            self._note(status, len(sent))
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if not any(name.lower() == "content-length" for name, _ in headers):
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(sent)
            self.wfile.flush()
            if self.fault == "stop":
                proxy.ended.wait()
            if self.fault in ("cut", "stop"):
                self._hang_up()

        def _note(self, status: int, sent: int) -> None:
            """Before the client knows of the answer, which may look at the log next."""
            proxy.log.append(Asked(self.command, self.path, status, sent, self.fault, self.received))

        def _hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def handle_expect_100(self) -> bool:
            """Lets large bodies come at once, which curl else holds back for a second."""
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.wfile.flush()
            return True

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    return Handler


def moto(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
    """What moto's S3 says to a request: the application of its server, without another connection for each request."""
    try:
        answer = _client().open(path, method=method, headers=headers, data=body)
    except Exception:  # moto's own, where two requests for one object meet
        return 500, [("Content-Type", "application/xml")], _ANSWERS["500"]
    passed = [(name, value) for name, value in answer.headers if name.lower() not in ONLY_ONE_HOP]
    if "Content-Length" not in answer.headers:
        passed.append(("Content-Length", str(len(answer.data))))
    return answer.status_code, passed, b"" if method == "HEAD" or answer.status_code in (204, 304) else answer.data


@functools.cache
def _client() -> Any:
    from botocore import utils
    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.test import Client

    # It parses the time of each object in each list, which takes longer than to find them.
    utils.parse_timestamp = functools.lru_cache(utils.parse_timestamp)
    # It makes its table of errors anew for each error that it answers with.
    errors: Any = importlib.import_module("moto.core.errors")
    if hasattr(errors, "ErrorLookupFactory"):
        errors.ErrorLookupFactory = functools.cache(errors.ErrorLookupFactory)
    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = str(PAGE)
    return Client(create_backend_app("s3"), use_cookies=False)


class Folders:
    """What buckets of each kind do with whole folders."""

    def upload(self: Any, directory: Path, prefix: str) -> str:
        """Puts all files of a directory below a prefix, and returns its URL."""
        for file in sorted(directory.rglob("*")):
            if file.is_file():
                self.put(f"{prefix}/{file.relative_to(directory).as_posix()}", file.read_bytes())
        return f"{self.url}/{prefix}"

    def download(self: Any, prefix: str, directory: Path) -> Path:
        """Writes all objects below a prefix as files of a new directory."""
        for key in self.keys(prefix + "/"):
            file = directory / key[len(prefix) + 1 :]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.get(key))
        return directory


@dataclasses.dataclass(frozen=True)
class Bucket(Folders):
    """An empty bucket for one test.

    Attributes:
        name: of the bucket.
        proxy: that all requests of the library pass.
    """

    name: str
    proxy: Proxy

    @property
    def url(self) -> str:
        """Of the bucket."""
        return f"s3://{self.name}"

    def _ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """The server's own answer, past the proxy."""
        answer = self.proxy.store(method, f"/{self.name}{path}", dict(SIGNED), body)
        assert answer[0] < 300, (method, path, answer)
        return answer

    def keys(self, prefix: str = "") -> list[str]:
        """Of all objects."""
        found: list[str] = []
        query = {"list-type": "2", "prefix": prefix}
        while True:
            page = ElementTree.fromstring(self._ask("GET", f"?{urllib.parse.urlencode(query)}")[2])
            found += [node.text or "" for node in page.iterfind("{*}Contents/{*}Key")]
            more = page.findtext("{*}NextContinuationToken")
            if not more:
                return found
            query["continuation-token"] = more

    def get(self, key: str) -> bytes:
        """An object's content."""
        return self._ask("GET", f"/{urllib.parse.quote(key)}")[2]

    def put(self, key: str, content: bytes) -> None:
        """Writes an object."""
        self._ask("PUT", f"/{urllib.parse.quote(key)}", content)

    def delete(self, key: str) -> None:
        """Deletes an object."""
        self._ask("DELETE", f"/{urllib.parse.quote(key)}")


def serving() -> closing[Proxy]:
    """A store behind a proxy."""
    return closing(Proxy(moto))


def new_bucket(proxy: Proxy) -> Bucket:
    """A bucket with a name of its own."""
    bucket = Bucket(f"b-{uuid.uuid4().hex[:12]}", proxy)
    bucket._ask("PUT", "")
    return bucket


def environment(proxy: Proxy) -> dict[str, str]:
    """The variables that lead the library, and its subprocesses, to the proxy."""
    return {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
