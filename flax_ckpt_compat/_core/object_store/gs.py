"""Reach ``gs://``: Google Cloud Storage. Lists are verified, because TensorStore's can end too early.

TensorStore's driver mistakes an error response for an empty last page. Measured with TensorStore 0.1.86: every response
from 400 to 416 with a JSON body ends a list as if there was no more, so also a missing bucket, an expired token or a
denied list. Reads and writes fail properly, except in a missing bucket, where every object is just missing. So the end
of a list is verified: by reading an object that cannot exist, and by one request to the JSON API, with TensorStore's
token where it can be known.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import logging
import os
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import service_account
from flax_ckpt_compat._core.object_store.base_scheme import StoreScheme
from flax_ckpt_compat._core.object_store.request_errors import store_error
from flax_ckpt_compat._core.object_store.retrying import retry, split
from flax_ckpt_compat._core.signal_handler_errors import is_of_handler

# Names in a page. A list shorter than its first page had no second one that could fail.
_PAGE = 1000
_log = logging.getLogger("flax_ckpt_compat")
_TRIALS = 4
_TIMEOUT = 30.0  # s
_CHECK_TIMEOUT = 10.0  # s
_TRANSIENT_CODES = (408, 429)
_SERVER_FAILED = 500
_UNAUTHORIZED = 401
_DENIED = (_UNAUTHORIZED, 403)
_TOKEN_URL = "https://oauth2.googleapis.com/token"  # noqa: S105
_METADATA = "computeMetadata/v1/instance/service-accounts/default/token"
_TOKEN_TIMEOUT, _METADATA_TIMEOUT = 10.0, 2.0  # s
_MARGIN = 60.0  # s before expiry at which a token is renewed
_NO_TOKEN_FOR = 300.0  # s that a failure is cached for

_lock = threading.RLock()  # a signal handler may save
# Source → expiry, token; also "unreachable" and "answered", of the JSON API.
_cache: dict[str, tuple[float, str | None]] = {}


class GS(StoreScheme):
    """The scheme ``gs``."""

    tells_sizes = False
    needs_commit_file = True

    def bucket_spec(self, bucket: str) -> dict[str, Any]:
        """See `StoreScheme.bucket_spec`."""
        return {"driver": "gcs", "bucket": bucket}

    def list_keys(self, url: str, start: bytes, stop: bytes) -> list[bytes]:
        """See `StoreScheme.list_keys`; raise too if the bucket does not exist."""
        found: list[bytes] = []
        trials = _TRIALS
        while trials:
            more = self.list_once(url, start, stop)
            found += more
            if more and len(more) < _PAGE:
                return found
            start = max(more) + b"\0" if more else start
            if self._nothing_left(url, start, stop):
                return found
            trials = _TRIALS if more else trials - 1
        raise store_error(url, "listed", "the store lists no names, though objects exist", "")

    def stored_crc32c(self, url: str) -> int | None:
        """See `StoreScheme.stored_crc32c`; None also where the JSON API cannot be asked."""
        found = _metadata_of(url, "crc32c")
        with suppress(ValueError):
            return None if found is None else int.from_bytes(base64.b64decode(found, validate=True))
        return None

    def stored_size(self, url: str) -> int | None:
        """See `StoreScheme.stored_size`; None also where the JSON API cannot be asked."""
        found = _metadata_of(url, "size")
        return int(found) if found is not None and found.isascii() and found.isdigit() else None

    def _nothing_left(self, url: str, start: bytes, stop: bytes) -> bool:
        """Return whether the range has no keys; raise if the bucket is missing or may not be listed."""
        # An object that cannot exist; fails if credentials are missing, expired or insufficient.
        _, bucket, key = split(url)
        absent = f"{key}/.absent-{uuid.uuid4().hex}".lstrip("/")

        def read_absent() -> Any:
            return self.open(bucket).read(absent, byte_range=slice(0, 0))

        begun, known_token = [read_absent()], token()  # the two requests are under way at once
        try:
            status, content = _request_api(url, start, stop, known_token)
            if status == _UNAUTHORIZED and (renewed := _other_token(known_token)) is not None:
                status, content = _request_api(url, start, stop, renewed)
        except StorageError as error:
            retry(url, "listed", lambda: begun.pop() if begun else read_absent())
            if not isinstance(error.__cause__, _UnreachableError):
                raise
            # TensorStore has just reached the store: its proxy and certificates can differ from Python's.
            _log.warning("%s: the JSON API cannot be reached to prove that nothing is there: %s", url, error.__cause__)
            return not self.list_once(url, start, stop)
        retry(url, "listed", lambda: begun.pop() if begun else read_absent())
        if status == 200:
            return not content.get("items")
        if status == 404 or known_token is not None or status not in _DENIED:
            reason = str(content.get("error", {}).get("message", "no reason was given"))
            raise store_error(url, "listed", f"{reason} (HTTP {status})", str(status))
        # An anonymous request learned that the bucket exists. Without permission to list, the read of a missing object
        # with TensorStore's credentials would have failed too (HTTP 403).
        return not self.list_once(url, start, stop)


def _metadata_of(url: str, field: str) -> str | None:
    """Return a field of an object's metadata, or None; asked once, because all can do without it."""
    _, bucket, key = split(url)
    at = f"{urllib.parse.quote(bucket, safe='')}/o/{urllib.parse.quote(key, safe='')}"
    known_token = token()
    request = _api_request(f"{_server()}/storage/v1/b/{at}?fields={field},contentEncoding", known_token)
    try:
        if time.monotonic() < _cache.get("unreachable", (0.0, None))[0]:
            return None
        status, content = _send(request, _CHECK_TIMEOUT)
        if status == _UNAUTHORIZED and (renewed := _other_token(known_token)) is not None:
            status, content = _send(_api_request(request.full_url, renewed), _CHECK_TIMEOUT)
        _cache["answered"] = time.monotonic(), None
        # What is stored compressed is sent uncompressed.
        if status == 200 and not content.get("contentEncoding"):
            return str(content[field])
    except _UnreachableError:
        # Where it never answered, Python may have no way to it; else it should soon again.
        seconds = _CHECK_TIMEOUT if "answered" in _cache else _NO_TOKEN_FOR
        _cache["unreachable"] = time.monotonic() + seconds, None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.debug("%s: the store does not tell its %s: %s", url, field, error)
    return None


def _request_api(url: str, start: bytes, stop: bytes, token: str | None) -> tuple[int, dict[str, Any]]:
    """Request the first name of a range from the JSON API; return status and content."""
    bucket = urllib.parse.quote(split(url)[1], safe="")
    query = {"maxResults": "1", "fields": "items(name),nextPageToken", "startOffset": start}
    if stop:
        query["endOffset"] = stop
    endpoint = f"{_server()}/storage/v1/b/{bucket}/o"
    page = ""
    while True:
        encoded_query = urllib.parse.urlencode(query | ({"pageToken": page} if page else {}))
        request = _api_request(f"{endpoint}?{encoded_query}", token)
        status, content = retry(url, "listed", functools.partial(_start, request))
        page = content.get("nextPageToken", "")
        if status != 200 or content.get("items") or not page:  # an empty page need not be the last one
            return status, content


def _server() -> str:
    return (os.environ.get("TENSORSTORE_GCS_HTTP_URL") or "https://storage.googleapis.com").rstrip("/")


def _api_request(endpoint: str, token: str | None) -> urllib.request.Request:
    request = urllib.request.Request(endpoint)  # noqa: S310  (the store's own)
    if token is not None:
        request.add_unredirected_header("Authorization", f"Bearer {token}")  # a redirect may lead anywhere
    return request


class _TransientError(OSError):
    """A failure that `retry` tries again, by its text."""


class _UnreachableError(_TransientError):
    """The JSON API cannot be reached."""


def _start(request: urllib.request.Request) -> SimpleNamespace:
    """Return a request with the interface of a TensorStore future; it leaves nothing to cancel."""
    return SimpleNamespace(result=functools.partial(_send, request), cancel=bool)


def _send(request: urllib.request.Request, timeout: float) -> tuple[int, dict[str, Any]]:
    """Send a request and return the response's status and content."""
    ssl_context = _ssl_context() if request.type == "https" else None
    try:
        with urllib.request.urlopen(request, timeout=min(timeout, _TIMEOUT), context=ssl_context) as answer:  # noqa: S310
            return answer.status, _content_of(answer)
    except urllib.error.HTTPError as error:
        if error.code >= _SERVER_FAILED or error.code in _TRANSIENT_CODES:
            raise _TransientError(f"UNAVAILABLE: {error.reason} (HTTP {error.code})") from error
        return error.code, _error_content(error)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if is_of_handler(error):
            raise
        raise _UnreachableError(f"UNAVAILABLE: {error}") from error


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Return the TLS context; loading its certificates takes some 20 ms."""
    return ssl.create_default_context(cafile=os.environ.get("TENSORSTORE_CA_BUNDLE"))


def _content_of(answer: Any) -> dict[str, Any]:
    """Return the JSON object of a response; raise OSError if it was cut, and ValueError if it has none."""
    try:
        found = json.loads(answer.read())
    except http.client.HTTPException as error:  # which is no OSError
        raise ConnectionError(f"the answer was cut: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("the answer is not a JSON object")  # noqa: TRY004  (as for other text)
    return found


def _error_content(error: urllib.error.HTTPError) -> dict[str, Any]:
    try:
        return _content_of(error)
    except (OSError, ValueError):
        return {}


def token() -> str | None:
    """Return the token that TensorStore would find, or None if it cannot be known here."""
    given = os.environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING")
    if given:
        return given
    file = _credentials_file()
    with _lock:
        source = file or "metadata"
        until, known = _cache.get(source, (0.0, None))
        if time.monotonic() >= until:
            seconds, known = _request_token(file)
            _cache[source] = time.monotonic() + seconds, known
        return known


def _other_token(refused: str | None) -> str | None:
    """Return another token than a refused one, which was revoked, or expired while the machine slept; or None."""
    with _lock:
        for source in [source for source, (_, known) in _cache.items() if known is not None and known == refused]:
            del _cache[source]
    found = token()
    return None if found == refused else found


def _credentials_file() -> str | None:
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if named:
        return named
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    usual = os.path.join(folder, "application_default_credentials.json")
    return usual if os.path.isfile(usual) else None


def _request_token(file: str | None) -> tuple[float, str | None]:
    """Request a token with the credentials in a file, or of this machine; return the seconds that it is valid for."""
    server = os.environ.get("GCE_METADATA_ROOT") or "metadata.google.internal"
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException):
        if file is None:
            headers, timeout = {"Metadata-Flavor": "Google"}, _METADATA_TIMEOUT
            request = urllib.request.Request(f"http://{server}/{_METADATA}", headers=headers)
        else:
            with open(file, encoding="utf-8") as opened:
                content = json.load(opened)
            issuer = content.get("token_uri") or _TOKEN_URL
            fields = service_account.grant(content, issuer)
            if content.get("type") == "authorized_user":
                fields = {name: content[name] for name in ("client_id", "client_secret", "refresh_token")}
                fields["grant_type"] = "refresh_token"
            if fields is None:
                return _NO_TOKEN_FOR, None
            body = urllib.parse.urlencode(fields).encode()
            request, timeout = urllib.request.Request(issuer, body), _TOKEN_TIMEOUT  # noqa: S310
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            found = _content_of(answer)
        return max(0.0, float(found.get("expires_in", 0)) - _MARGIN), str(found["access_token"])
    return _NO_TOKEN_FOR, None
