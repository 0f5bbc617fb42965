"""A hub of Hugging Face on loopback: what its Python client asks of a model repository, over files in memory."""

import dataclasses
import hashlib
import importlib.util
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_REPO = "org/model"


def why_not() -> str | None:
    """Why the client cannot be used here; None where it can."""
    return None if importlib.util.find_spec("huggingface_hub") else "huggingface_hub is not installed (extra 'hf')"


@dataclasses.dataclass
class Hub:
    """A server with one repository, ``org/model``.

    Attributes:
        files: path in the repository → content.
        address: of the server.
    """

    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    address: str = ""

    @property
    def url(self) -> str:
        """Of the repository."""
        return f"hf://{_REPO}"

    @property
    def commit(self) -> str:
        """The name of what it holds now: clients keep the files of a commit for ever."""
        named = b"".join(path.encode() + hashlib.sha1(found).digest() for path, found in sorted(self.files.items()))
        return hashlib.sha1(named).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        """What lists and look-ups say of a file."""
        content = self.files[path]
        return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": path}

    def tree(self, folder: str) -> list[dict[str, Any]]:
        """The files and folders below a folder, as the Hub lists them."""
        prefix = f"{folder}/" if folder else ""
        inside = [path for path in sorted(self.files) if path.startswith(prefix)]
        above = {path[: end.start()] for path in inside for end in re.finditer("/", path) if end.start() >= len(prefix)}
        folders = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(above)]
        return folders + [self.entry(path) for path in inside]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if match := re.fullmatch(rf"/api/models/{_REPO}/tree/[^/]+/?(.*)", path):
                found = hub.tree(match[1])
                self._json(found) if found or not match[1] else self._missing()
            elif re.fullmatch(rf"/api/models/{_REPO}/paths-info/[^/]+", path):
                self._json([hub.entry(one) for one in _paths(body) if one in hub.files])
            elif re.fullmatch(rf"/api/models/{_REPO}(/revision/[^/]+)?", path):
                about = {"id": _REPO, "modelId": _REPO, "sha": hub.commit}
                self._json(about | {"private": False, "tags": [], "siblings": []})
            elif (match := re.fullmatch(rf"/{_REPO}/resolve/[^/]+/(.+)", path)) and match[1] in hub.files:
                self._send(200, hub.files[match[1]], [])
            else:
                is_of_repository = path.startswith((f"/{_REPO}/", f"/api/models/{_REPO}"))
                self._missing("EntryNotFound" if is_of_repository else "RepoNotFound")

        do_HEAD = do_POST = do_GET

        def _json(self, content: Any) -> None:
            self._send(200, json.dumps(content).encode(), [("Content-Type", "application/json")])

        def _missing(self, code: str = "EntryNotFound") -> None:
            self._send(404, b"{}", [("X-Error-Code", code), ("Content-Type", "application/json")])

        def _send(self, status: int, content: bytes, headers: list[tuple[str, str]]) -> None:
            self.send_response(status)
            common = [("Content-Length", str(len(content))), ("ETag", f'"{hashlib.sha1(content).hexdigest()}"')]
            for name, value in [*headers, *common, ("X-Repo-Commit", hub.commit)]:
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Handler


def _paths(body: bytes) -> list[str]:
    text = body.decode()
    found = json.loads(text)["paths"] if text.startswith("{") else urllib.parse.parse_qs(text).get("paths", [])
    return [found] if isinstance(found, str) else list(found)


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub without files."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
