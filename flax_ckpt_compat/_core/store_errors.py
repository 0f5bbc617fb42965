"""What an object store refuses, in our words: the one seam at which TensorStore's errors turn into ours."""

from __future__ import annotations

import errno
import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any

from flax_ckpt_compat._core import store_specs
from flax_ckpt_compat._core.errors import StorageError

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
    return code_of(error) in (*_PASSING, "PERMISSION_DENIED", "UNAUTHENTICATED") and not isinstance(error, StorageError)


def missing(url: str) -> FileNotFoundError:
    """The error for what is not there."""
    return FileNotFoundError(errno.ENOENT, "no such object in the store", url)


def refused(url: str, doing: str, error: Exception) -> Exception:
    """The error that tells what the store refused, why, and what to do."""
    text, code = str(error), code_of(error)
    if code == "OUT_OF_RANGE":
        size = _SIZE.search(text)
        return OutOfRangeError(int(size[1] or size[2]) if size else -1)
    scheme, bucket, _ = store_specs.split(url)
    reason = "it did not answer in time" if isinstance(error, TimeoutError) else text.partition(" [")[0][:300]
    return StorageError(f"{url} could not be {doing}: {reason}; {_remedy(scheme, bucket, text, code)}", path=url)


def _remedy(scheme: str, bucket: str, text: str, code: str) -> str:
    if "NoSuchBucket" in text or code == "NOT_FOUND":
        return f"there is no bucket {bucket!r}, or not at this endpoint: create it, or correct the URL"
    if "redentials" in text or code == "UNAUTHENTICATED":
        return f"give credentials: {_CREDENTIALS[scheme]}"
    if code == "PERMISSION_DENIED" or "AccessDenied" in text or "403" in text:
        return f"there are no credentials, or none that may do that in the bucket {bucket!r}: {_CREDENTIALS[scheme]}"
    if "is not registered" in text:
        extra = f"flax-ckpt-compat[{_EXTRAS[scheme]}]"
        return f"this build of tensorstore has no driver for it: pip install --upgrade '{extra}'"
    return "check the network and the endpoint" + (" (AWS_ENDPOINT_URL)" if scheme == "s3" else "") + ", and try again"


_EXTRAS = {"s3": "s3", "gs": "gcs"}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
}
