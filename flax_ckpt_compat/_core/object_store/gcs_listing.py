"""List ``gs://`` completely: TensorStore's driver mistakes an error response for an empty last page.

Measured with TensorStore 0.1.86: every response from 400 to 416 with a JSON body ends a list as if there was no more,
so also a missing bucket, an expired token or a denied list. Reads and writes fail properly, except in a missing
bucket, where every object is just missing. So the end of a list is verified: by reading an object that cannot exist,
and by one request to the JSON API, with TensorStore's token where it can be known.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import specs, tokens
from flax_ckpt_compat._core.object_store.store_errors import retry, store_error

# Names in a page. A list shorter than its first page had no second one that could fail.
_PAGE = 1000
_log = logging.getLogger("flax_ckpt_compat")
_TRIALS = 4
_TIMEOUT = 30.0  # s
_TRANSIENT_CODES = (408, 429)
_SERVER_FAILED = 500
_DENIED = (401, 403)

ListKeys = Callable[[bytes, bytes], list[bytes]]


class _TransientError(OSError):
    """A failure that `retry` tries again, by its text."""


def list_all(url: str, start: bytes, stop: bytes, list_keys: ListKeys) -> list[bytes]:
    """Return all keys from ``start`` up to ``stop``.

    Args:
        url: the folder's URL, for messages.
        start: first key.
        stop: end, exclusive; b"" for the end of the bucket.
        list_keys: lists the keys of a range, and may leave out keys at the end.

    Raises:
        StorageError: the store refused to list, or the bucket does not exist.
    """
    found: list[bytes] = []
    for _ in range(_TRIALS):
        more = list_keys(start, stop)
        while more:
            found += more
            if len(more) < _PAGE:
                return found
            start = max(more) + b"\0"
            more = list_keys(start, stop)
        if _nothing_left(url, start, stop, list_keys):
            return found
    raise store_error(url, "listed", "the store lists no names, though objects exist", "")


def _nothing_left(url: str, start: bytes, stop: bytes, list_keys: ListKeys) -> bool:
    """Return whether the range has no keys; raise if the bucket is missing or may not be listed."""
    _read_absent_object(url)
    token = tokens.token()
    try:
        status, content = _request_api(url, start, stop, token)
    except StorageError as error:
        if not isinstance(error.__cause__, _UnreachableError):
            raise
        # TensorStore has just reached the store: its proxy and certificates can differ from Python's.
        _log.warning("%s: the JSON API cannot be reached to prove that nothing is there: %s", url, error.__cause__)
        return not list_keys(start, stop)
    if status == 200:
        return not content.get("items")
    if status == 404 or token is not None or status not in _DENIED:
        reason = str(content.get("error", {}).get("message", "no reason was given"))
        raise store_error(url, "listed", f"{reason} (HTTP {status})", str(status))
    # An anonymous request learned that the bucket exists. Without permission to list, the read of a missing object
    # with TensorStore's credentials would have failed too (HTTP 403).
    return not list_keys(start, stop)


def _read_absent_object(url: str) -> None:
    """Read an object that cannot exist; raise if credentials are missing, expired or insufficient."""
    key = specs.split(url)[2]
    absent = f"{key}/.absent-{uuid.uuid4().hex}".lstrip("/")
    retry(url, "listed", lambda: specs.bucket_store(url).read(absent, byte_range=slice(0, 0)))


def _request_api(url: str, start: bytes, stop: bytes, token: str | None) -> tuple[int, dict[str, Any]]:
    """Request the first name of a range from the JSON API; return status and content."""
    bucket = urllib.parse.quote(specs.split(url)[1], safe="")
    query = {"maxResults": "1", "fields": "items(name),nextPageToken", "startOffset": start}
    if stop:
        query["endOffset"] = stop
    endpoint = f"{specs.gcs_endpoint()}/storage/v1/b/{bucket}/o"
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    page = ""
    while True:
        encoded_query = urllib.parse.urlencode(query | ({"pageToken": page} if page else {}))
        request = urllib.request.Request(f"{endpoint}?{encoded_query}", headers=headers)  # noqa: S310  (the store's own)
        status, content = retry(url, "listed", functools.partial(_Request, request))
        page = content.get("nextPageToken", "")
        if status != 200 or content.get("items") or not page:  # an empty page need not be the last one
            return status, content


class _UnreachableError(_TransientError):
    """The JSON API cannot be reached."""


class _Request:
    """A request with the interface of a TensorStore future, for `retry`."""

    def __init__(self, request: urllib.request.Request) -> None:
        self._request = request

    def result(self, timeout: float) -> tuple[int, dict[str, Any]]:
        """Send the request and return the response's status and content.

        Raises:
            OSError: no response, or a transient error.
        """
        ssl_context = _ssl_context() if self._request.type == "https" else None
        try:
            with urllib.request.urlopen(self._request, timeout=min(timeout, _TIMEOUT), context=ssl_context) as answer:  # noqa: S310
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code >= _SERVER_FAILED or error.code in _TRANSIENT_CODES:
                raise _TransientError(f"UNAVAILABLE: {error.reason} (HTTP {error.code})") from error
            return error.code, _error_content(error)
        except (OSError, ValueError) as error:
            raise _UnreachableError(f"UNAVAILABLE: {error}") from error

    def cancel(self) -> None:
        """Do nothing: `result` leaves nothing running."""


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Return the TLS context; loading its certificates takes some 20 ms."""
    return ssl.create_default_context(cafile=os.environ.get("TENSORSTORE_CA_BUNDLE"))


def _error_content(error: urllib.error.HTTPError) -> dict[str, Any]:
    try:
        found = json.loads(error.read())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
