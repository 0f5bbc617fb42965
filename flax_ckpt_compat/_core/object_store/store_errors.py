"""Retry requests to object stores, and translate TensorStore's errors into ours."""

from __future__ import annotations

import errno
import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import specs

_log = logging.getLogger("flax_ckpt_compat")
_ATTEMPTS = 4
_FIRST_PAUSE = 0.2  # s
_TIMEOUT = 30.0  # s for one attempt, beside the time that its bytes may take
_MIN_RATE = 2**20  # bytes/s
_TRANSIENT_CODES = ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "ABORTED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
_EXHAUSTED = "retry attempts failed"  # TensorStore has tried often enough
_CODE = re.compile(r"\b([A-Z][A-Z_]{4,}): ")
_SIZE = re.compile(r"<ActualObjectSize>(\d+)<|total size (\d+)")


class OutOfRangeError(Exception):
    """A range ends beyond the end of its object.

    Attributes:
        size: size of the object in bytes; -1 if the store does not tell.
    """

    def __init__(self, size: int):
        super().__init__(size)
        self.size = size


def retry(url: str, operation: str, request: Callable[[], Any], nbytes: int = 0) -> Any:
    """Run an idempotent request, retried a few times with growing pauses; return its result.

    Args:
        url: URL of the object or folder, for messages.
        operation: completes "could not be …".
        request: starts the request and returns TensorStore's future.
        nbytes: bytes to transfer, which extend the timeout.

    Raises:
        OutOfRangeError: a read beyond the end of the object.
        StorageError: the store refused, or did not answer in time.
    """
    for trial in range(_ATTEMPTS):
        future = None
        try:
            future = request()
            return future.result(timeout=_TIMEOUT + nbytes / _MIN_RATE)
        except (ValueError, OSError, RuntimeError) as error:
            if future is not None:
                future.cancel()  # else it might still take effect, after later requests
            transient = isinstance(error, TimeoutError) or (
                code_of(error) in _TRANSIENT_CODES and _EXHAUSTED not in str(error)
            )
            if not transient or trial + 1 == _ATTEMPTS:
                raise translate_error(url, operation, error) from error
            pause = _FIRST_PAUSE * 2**trial * random.uniform(0.5, 1)  # noqa: S311  (spreads out those that wait)
            _log.info("%s could not be %s, trying again in %.1f s: %s", url, operation, pause, error)
            time.sleep(pause)
    raise AssertionError


def code_of(error: BaseException) -> str:
    """Return TensorStore's error code, such as UNAVAILABLE; '' if there is none."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def is_store_error(error: BaseException) -> bool:
    """Return whether TensorStore's error is of the store or the network, and not of the stored data."""
    if isinstance(error, StorageError):
        return False
    known = code_of(error) in (*_TRANSIENT_CODES, "PERMISSION_DENIED", "UNAUTHENTICATED")
    return known or _status_of(str(error)) not in _OBJECT_STATUSES


def _status_of(text: str) -> str:
    """Return the HTTP status in TensorStore's error; '' if there is none."""
    found = _STATUS.search(text)
    return found[1] if found else ""


def not_found(url: str) -> FileNotFoundError:
    """Return the error for a missing object."""
    return FileNotFoundError(errno.ENOENT, "no such object in the store", url)


def translate_error(url: str, operation: str, error: Exception) -> Exception:
    """Translate TensorStore's error into ours, with reason and remedy."""
    text, code = str(error), code_of(error)
    if code == "OUT_OF_RANGE":
        size = _SIZE.search(text)
        return OutOfRangeError(int(size[1] or size[2]) if size else -1)
    if isinstance(error, TimeoutError):
        return store_error(url, operation, "it did not answer in time", "")
    status, reason = _status_of(text), text.partition(" [")[0][:300]
    if reason.endswith("Unknown") and status:  # a response to HEAD has no text
        reason = f"the store answered HTTP {status} and gave no reason"
    return store_error(url, operation, reason, f"{text} {_STATUS_OF_CODE.get(code, status)}")


def store_error(url: str, operation: str, reason: str, codes: str) -> StorageError:
    """Return the error for a failed request.

    Args:
        url: URL of the object or folder.
        operation: completes "could not be …".
        reason: the store's message.
        codes: text with error names and, as its last word, the HTTP status; selects the remedy.
    """
    scheme, bucket, _ = specs.split(url)
    return StorageError(f"{url} could not be {operation}: {reason}; {_remedy(scheme, bucket, codes)}", path=url)


def _remedy(scheme: str, bucket: str, codes: str) -> str:
    last = codes.rpartition(" ")[2]
    if "bucket name" in codes or "InvalidBucketName" in codes:
        rule = "3 to 63 lower-case letters, digits, dots and hyphens" + ("" if scheme == "s3" else ", and underscores")
        return f"{bucket!r} cannot be the name of a bucket ({rule}): correct the URL, {scheme}://bucket/folder"
    if "NoSuchBucket" in codes or last == "404":
        return f"there is no bucket {bucket!r}, or not at this endpoint: create it, or correct the URL"
    if _EXPIRED.search(codes) or (scheme == "gs" and last == "401"):
        return f"the credentials have expired or are not valid: renew them, or {_CREDENTIALS[scheme]}"
    if "redentials" in codes or last == "401":
        return f"give credentials: {_CREDENTIALS[scheme]}"
    if "TimeTooSkewed" in codes:
        return "set the clock of this machine: requests are signed with the time"
    if last == "403" or "AccessDenied" in codes:
        return f"there are no credentials, or none that may do that in the bucket {bucket!r}: {_CREDENTIALS[scheme]}"
    if "is not registered" in codes:
        extra = f"flax-ckpt-compat[{_EXTRAS[scheme]}]"
        return f"this build of tensorstore has no driver for it: pip install --upgrade '{extra}'"
    if last in ("301", "307") or "AuthorizationHeaderMalformed" in codes:
        return f"the bucket {bucket!r} is in another region, or at another endpoint: set {_ENDPOINT_SETTINGS[scheme]}"
    if last.isdigit() and last.startswith("4"):
        return f"the store refused the request: check the URL, the credentials and {_ENDPOINT_SETTINGS[scheme]}"
    return "check the network and the endpoint" + (" (AWS_ENDPOINT_URL)" if scheme == "s3" else "") + ", and try again"


_STATUS = re.compile(r"http_response_code='(\d+)'")
# Statuses of an object, and not of the store: it exists, is missing, or is shorter.
_OBJECT_STATUSES = ("", "200", "206", "404", "412", "416")
_EXPIRED = re.compile(r"Expired|InvalidToken|TokenRefreshRequired|Invalid Credentials|invalid_grant")
_STATUS_OF_CODE = {"NOT_FOUND": "404", "UNAUTHENTICATED": "401"}
_EXTRAS = {"s3": "s3", "gs": "gcs"}
_ENDPOINT_SETTINGS = {"s3": "AWS_REGION and AWS_ENDPOINT_URL", "gs": "TENSORSTORE_GCS_HTTP_URL"}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
}
