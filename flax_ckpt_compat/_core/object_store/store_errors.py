"""What an object store refuses, in our words: the one seam at which TensorStore's errors turn into ours."""

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
_PATIENCE = 30.0  # s for one attempt, beside the time that its bytes may take
_SLOWEST = 2**20  # bytes/s
_PASSING = ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "ABORTED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
_EXHAUSTED = "retry attempts failed"  # TensorStore has tried often enough
_CODE = re.compile(r"\b([A-Z][A-Z_]{4,}): ")
_SIZE = re.compile(r"<ActualObjectSize>(\d+)<|total size (\d+)")


class OutOfRangeError(Exception):
    """A range that reaches beyond the end of its object.

    Attributes:
        size: of the object in bytes; -1 where the store does not tell.
    """

    def __init__(self, size: int):
        super().__init__(size)
        self.size = size


def attempt(url: str, doing: str, ask: Callable[[], Any], nbytes: int = 0) -> Any:
    """The result of a request that is safe to repeat, tried a few times with growing pauses.

    Args:
        url: what it is about, for messages.
        doing: completes "could not be …".
        ask: starts the request and returns TensorStore's future.
        nbytes: how much it moves.

    Raises:
        OutOfRangeError: a read beyond the end of the object.
        StorageError: the store refused, or did not answer in time.
    """
    for trial in range(_ATTEMPTS):
        future = None
        try:
            future = ask()
            return future.result(timeout=_PATIENCE + nbytes / _SLOWEST)
        except (ValueError, OSError, RuntimeError) as error:
            if future is not None:
                future.cancel()  # else it might still be done, after later requests
            passing = isinstance(error, TimeoutError) or (code_of(error) in _PASSING and _EXHAUSTED not in str(error))
            if not passing or trial + 1 == _ATTEMPTS:
                raise refused(url, doing, error) from error
            pause = _FIRST_PAUSE * 2**trial * random.uniform(0.5, 1)  # noqa: S311  (spreads out those that wait)
            _log.info("%s could not be %s, trying again in %.1f s: %s", url, doing, pause, error)
            time.sleep(pause)
    raise AssertionError


def code_of(error: BaseException) -> str:
    """TensorStore's name for the kind of an error; '' where it gives none."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def is_refusal(error: BaseException) -> bool:
    """Whether TensorStore's error tells of the store or the network, and not of what is stored."""
    if isinstance(error, StorageError):
        return False
    known = code_of(error) in (*_PASSING, "PERMISSION_DENIED", "UNAUTHENTICATED")
    return known or _status_of(str(error)) not in _OF_OBJECTS


def _status_of(text: str) -> str:
    """The number of HTTP in TensorStore's error; '' where there is none."""
    found = _STATUS.search(text)
    return found[1] if found else ""


def missing(url: str) -> FileNotFoundError:
    """The error for what is not there."""
    return FileNotFoundError(errno.ENOENT, "no such object in the store", url)


def refused(url: str, doing: str, error: Exception) -> Exception:
    """The error that tells what the store refused, why, and what to do."""
    text, code = str(error), code_of(error)
    if code == "OUT_OF_RANGE":
        size = _SIZE.search(text)
        return OutOfRangeError(int(size[1] or size[2]) if size else -1)
    if isinstance(error, TimeoutError):
        return refusal(url, doing, "it did not answer in time", "")
    status, reason = _status_of(text), text.partition(" [")[0][:300]
    if reason.endswith("Unknown") and status:  # the answer to HEAD has no text
        reason = f"the store answered HTTP {status} and gave no reason"
    return refusal(url, doing, reason, f"{text} {_KINDS.get(code, status)}")


def refusal(url: str, doing: str, reason: str, kind: str) -> StorageError:
    """Return the error for a refused request.

    Args:
        url: what it was about.
        doing: completes "could not be …".
        reason: as the store gave it.
        kind: text that tells what to do: names of errors, and the number of HTTP as a word.
    """
    scheme, bucket, _ = specs.split(url)
    return StorageError(f"{url} could not be {doing}: {reason}; {_remedy(scheme, bucket, kind)}", path=url)


def _remedy(scheme: str, bucket: str, kind: str) -> str:
    last = kind.rpartition(" ")[2]
    if "bucket name" in kind or "InvalidBucketName" in kind:
        rule = "3 to 63 lower-case letters, digits, dots and hyphens" + ("" if scheme == "s3" else ", and underscores")
        return f"{bucket!r} cannot be the name of a bucket ({rule}): correct the URL, {scheme}://bucket/folder"
    if "NoSuchBucket" in kind or last == "404":
        return f"there is no bucket {bucket!r}, or not at this endpoint: create it, or correct the URL"
    if _STALE.search(kind) or (scheme == "gs" and last == "401"):
        return f"the credentials have expired or are not valid: renew them, or {_CREDENTIALS[scheme]}"
    if "redentials" in kind or last == "401":
        return f"give credentials: {_CREDENTIALS[scheme]}"
    if "TimeTooSkewed" in kind:
        return "set the clock of this machine: requests are signed with the time"
    if last == "403" or "AccessDenied" in kind:
        return f"there are no credentials, or none that may do that in the bucket {bucket!r}: {_CREDENTIALS[scheme]}"
    if "is not registered" in kind:
        extra = f"flax-ckpt-compat[{_EXTRAS[scheme]}]"
        return f"this build of tensorstore has no driver for it: pip install --upgrade '{extra}'"
    if last in ("301", "307") or "AuthorizationHeaderMalformed" in kind:
        return f"the bucket {bucket!r} is in another region, or at another endpoint: set {_WHERE[scheme]}"
    if last.isdigit() and last.startswith("4"):
        return f"the store refused the request: check the URL, the credentials and {_WHERE[scheme]}"
    return "check the network and the endpoint" + (" (AWS_ENDPOINT_URL)" if scheme == "s3" else "") + ", and try again"


_STATUS = re.compile(r"http_response_code='(\d+)'")
# Answers that tell of an object: it is there, is not, or is shorter.
_OF_OBJECTS = ("", "200", "206", "404", "412", "416")
_STALE = re.compile(r"Expired|InvalidToken|TokenRefreshRequired|Invalid Credentials|invalid_grant")
_KINDS = {"NOT_FOUND": "404", "UNAUTHENTICATED": "401"}
_EXTRAS = {"s3": "s3", "gs": "gcs"}
_WHERE = {"s3": "AWS_REGION and AWS_ENDPOINT_URL", "gs": "TENSORSTORE_GCS_HTTP_URL"}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
}
