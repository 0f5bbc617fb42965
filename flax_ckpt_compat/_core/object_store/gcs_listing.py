"""Prove that a list of ``gs://`` is whole: TensorStore's driver takes a refused page of names for an empty last one.

Measured with TensorStore 0.1.86: every answer from 400 to 416 with a JSON body, so also a missing bucket, an expired
token or a denied list, ends a list as if there was no more. Reads and writes are refused properly, but for a missing
bucket, in which every object is just missing. So the end of a list is asked for again: by reading an object that
cannot be there, and by one request to the JSON API, with the token that TensorStore sends where it can be known.
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
from flax_ckpt_compat._core.object_store.store_errors import attempt, refusal

# Names in a page; a list that ended before the first page was full had no second one that could be refused.
_PAGE = 1000
_log = logging.getLogger("flax_ckpt_compat")
_TRIALS = 4
_WAIT = 30.0  # s
_PASSING = (408, 429)
_SERVER_FAILED = 500
_DENIED = (401, 403)

List = Callable[[bytes, bytes], list[bytes]]


class _PassingError(OSError):
    """An answer that may be another one when asked again, in words that `attempt` retries."""


def whole_list(url: str, start: bytes, stop: bytes, ask: List) -> list[bytes]:
    """Return all keys from ``start`` up to ``stop``.

    Args:
        url: of the folder, for messages.
        start: first key.
        stop: the end, which is no part of it; b"" for the end of the bucket.
        ask: lists keys between two, and may leave out keys from the end on.

    Raises:
        StorageError: the store refused to list, or there is no such bucket.
    """
    found: list[bytes] = []
    for _ in range(_TRIALS):
        more = ask(start, stop)
        while more:
            found += more
            if len(more) < _PAGE:
                return found
            start = max(more) + b"\0"
            more = ask(start, stop)
        if _is_end(url, start, stop, ask):
            return found
    raise refusal(url, "listed", "the store gives no names, though objects are there", "")


def _is_end(url: str, start: bytes, stop: bytes, ask: List) -> bool:
    """Whether no key is there, once it is sure that the bucket is, and that its keys may be listed."""
    _read_nothing(url)
    token = tokens.token()
    try:
        status, content = _ask_api(url, start, stop, token)
    except StorageError as error:
        if not isinstance(error.__cause__, _UnreachableError):
            raise
        # TensorStore has just reached the store: ways out and trusted certificates are not always Python's own.
        _log.warning("%s: the JSON API cannot be reached to prove that nothing is there: %s", url, error.__cause__)
        return not ask(start, stop)
    if status == 200:
        return not content.get("items")
    if status == 404 or token is not None or status not in _DENIED:
        reason = str(content.get("error", {}).get("message", "no reason was given"))
        raise refusal(url, "listed", f"{reason} (HTTP {status})", str(status))
    # A stranger was told that the bucket is there. Who may not list it is not told either that an object is missing
    # (the store answers 403), and that much was asked with TensorStore's own credentials.
    return not ask(start, stop)


def _read_nothing(url: str) -> None:
    """Read an object that cannot be there, which is refused where credentials are missing, expired or not enough."""
    key = specs.split(url)[2]
    absent = f"{key}/.absent-{uuid.uuid4().hex}".lstrip("/")
    attempt(url, "listed", lambda: specs.bucket_store(url).read(absent, byte_range=slice(0, 0)))


def _ask_api(url: str, start: bytes, stop: bytes, token: str | None) -> tuple[int, dict[str, Any]]:
    """Return status and content of the JSON API's answer to a request for the first name."""
    bucket = urllib.parse.quote(specs.split(url)[1], safe="")
    query = {"maxResults": "1", "fields": "items(name),nextPageToken", "startOffset": start}
    if stop:
        query["endOffset"] = stop
    endpoint = f"{specs.gcs_endpoint()}/storage/v1/b/{bucket}/o"
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    page = ""
    while True:
        asked = urllib.parse.urlencode(query | ({"pageToken": page} if page else {}))
        request = urllib.request.Request(f"{endpoint}?{asked}", headers=headers)  # noqa: S310  (the store's own)
        status, content = attempt(url, "listed", functools.partial(_Answer, request))
        page = content.get("nextPageToken", "")
        if status != 200 or content.get("items") or not page:  # a page may be empty and not the last one
            return status, content


class _UnreachableError(_PassingError):
    """There is no answer."""


class _Answer:
    """The answer to a request, with the ways of a TensorStore future that `attempt` knows."""

    def __init__(self, request: urllib.request.Request) -> None:
        self._request = request

    def result(self, timeout: float) -> tuple[int, dict[str, Any]]:
        """Send the request and return the answer's status and content.

        Raises:
            OSError: there is none, or it is one that passes.
        """
        trusted = _trusted() if self._request.type == "https" else None
        try:
            with urllib.request.urlopen(self._request, timeout=min(timeout, _WAIT), context=trusted) as answer:  # noqa: S310
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code >= _SERVER_FAILED or error.code in _PASSING:
                raise _PassingError(f"UNAVAILABLE: {error.reason} (HTTP {error.code})") from error
            return error.code, _content_of(error)
        except (OSError, ValueError) as error:
            raise _UnreachableError(f"UNAVAILABLE: {error}") from error

    def cancel(self) -> None:
        """Do nothing: nothing is under way when `result` has ended."""


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return whom to trust, which takes some 20 ms to read."""
    return ssl.create_default_context(cafile=os.environ.get("TENSORSTORE_CA_BUNDLE"))


def _content_of(error: urllib.error.HTTPError) -> dict[str, Any]:
    try:
        found = json.loads(error.read())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
