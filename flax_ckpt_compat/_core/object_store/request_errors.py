"""Translate TensorStore's errors of requests to object stores into ours, with reason and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store.schemes import SCHEMES, Scheme
from flax_ckpt_compat._core.signal_handler_errors import is_of_handler
from flax_ckpt_compat._core.storage_errors import TENSORSTORE_ERRORS

_TRANSIENT_CODES = ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "ABORTED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
_REFUSED_CODES = ("PERMISSION_DENIED", "UNAUTHENTICATED")
_EXHAUSTED = "retry attempts failed"  # TensorStore has tried often enough
# S3 refuses bytes that do not have the SHA-256 with which TensorStore signs each upload.
_DAMAGED_UPLOAD = re.compile(r"XAmzContentSHA256Mismatch|BadDigest")
_CODE = re.compile(r"\b([A-Z][A-Z_]{4,}): ")
_SIZE = re.compile(r"<ActualObjectSize>(\d+)<|total size (\d+)")
_STATUS = re.compile(r"http_response_code='(\d+)'")
# Statuses of an object, and not of the store: it exists, is missing, or is shorter.
_OBJECT_STATUSES = ("", "200", "206", "404", "412", "416")
_EXPIRED = re.compile(r"Expired|InvalidToken|TokenRefreshRequired|Invalid Credentials|invalid_grant")
_UNKNOWN = "Unknown"  # the reason of a response to HEAD, which has no text
_STATUS_OF_CODE = {"NOT_FOUND": "404", "UNAUTHENTICATED": "401"}


class OutOfRangeError(Exception):
    """A range ends beyond the end of its object, of ``size`` bytes; -1 if the store does not report it."""

    def __init__(self, size: int):
        super().__init__(size)
        self.size = size


def code_of(error: BaseException) -> str:
    """Return TensorStore's error code, such as UNAVAILABLE; '' if there is none."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def is_transient(error: Exception) -> bool:
    """Return whether a request that failed with this error may be tried again."""
    if isinstance(error, TimeoutError) or _DAMAGED_UPLOAD.search(str(error)):
        return True
    return code_of(error) in _TRANSIENT_CODES and _EXHAUSTED not in str(error)


def is_refusal(error: Exception) -> bool:
    """Return whether a store refused a request for its credentials."""
    return code_of(error) in _REFUSED_CODES or has_expired(error)


def has_expired(error: Exception) -> bool:
    """Return whether a store says that the credentials have expired; S3's answer to HEAD is HTTP 400 without a word."""
    text = str(error)
    return bool(_EXPIRED.search(text)) or (text.startswith(_UNKNOWN) and _status_of(text) == "400")


@contextmanager
def store_errors(path: str) -> Iterator[None]:
    """Translate errors of the store or the network, below a URL; pass on those of the stored data, and local ones."""
    try:
        yield
    except StorageError:
        raise
    except TENSORSTORE_ERRORS as error:
        if "://" in path and not is_of_handler(error) and (isinstance(error, TimeoutError) or is_store_error(error)):
            raise translate_error(path, "read", error) from error
        raise


def is_store_error(error: Exception) -> bool:
    """Return whether TensorStore's error is of the store or the network, and not of the stored data."""
    known = code_of(error) in (*_TRANSIENT_CODES, *_REFUSED_CODES)
    return known or _status_of(str(error)) not in _OBJECT_STATUSES


def _status_of(text: str) -> str:
    """Return the HTTP status in TensorStore's error; '' if there is none."""
    found = _STATUS.search(text)
    return found[1] if found else ""


def translate_error(url: str, operation: str, error: Exception) -> Exception:
    """Translate TensorStore's error into ours, with reason and remedy."""
    text, code = str(error), code_of(error)
    if code == "OUT_OF_RANGE":
        size = _SIZE.search(text)
        return OutOfRangeError(int(size[1] or size[2]) if size else -1)
    if isinstance(error, TimeoutError):
        return store_error(url, operation, "it did not answer in time", "")
    status, reason = _status_of(text), text.partition(" [")[0][:300]
    if reason.endswith(_UNKNOWN) and status:
        reason = f"the store answered HTTP {status} and gave no reason"
    return store_error(url, operation, reason, f"{text} {_STATUS_OF_CODE.get(code, status)}")


def store_error(url: str, operation: str, reason: str, codes: str) -> StorageError:
    """Return the error for a failed request.

    ``codes`` selects the remedy: text with error names and, as its last word, the HTTP status."""
    name, _, rest = url.partition("://")
    remedy = _remedy(SCHEMES[name.lower()], rest.partition("/")[0], codes)
    return StorageError(f"{url} could not be {operation}: {reason}; {remedy}", path=url)


def _remedy(scheme: Scheme, bucket: str, codes: str) -> str:
    last = codes.rpartition(" ")[2]
    if "bucket name" in codes or "InvalidBucketName" in codes:
        rule = f"3 to 63 {scheme.bucket_characters}"
        return f"{bucket!r} cannot be the name of a bucket ({rule}): correct the URL, {scheme.name}://bucket/folder"
    if re.search("Invalid (S3|GCS) object name", codes):
        return "no object can have this name: change the directory, prefix or step"
    if re.search("etag not found|Malformed List response", codes):
        return f"this is not an answer of a store: check the proxy before it, and {scheme.endpoint_settings}"
    if "NoSuchBucket" in codes or last == "404":
        return f"there is no bucket {bucket!r}, or not at this endpoint: create it, or correct the URL"
    if _EXPIRED.search(codes) or (scheme.is_401_of_expired and last == "401"):
        return f"the credentials have expired or are not valid: renew them, or {scheme.credentials}"
    if "redentials" in codes or last == "401":
        return f"give credentials: {scheme.credentials}"
    if "TimeTooSkewed" in codes:
        return "set the clock of this machine: requests are signed with the time"
    if _DAMAGED_UPLOAD.search(codes):
        return "the bytes were changed in transit, several times: check the proxy before the store, and this machine"
    if last == "403" or "AccessDenied" in codes:
        return f"there are no credentials, or they do not permit this in the bucket {bucket!r}: {scheme.credentials}"
    if "peer certificate" in codes:
        return "set TENSORSTORE_CA_BUNDLE to the file with the certificate of its authority, or correct the endpoint"
    if "is not registered" in codes:
        return "this build of tensorstore has no driver for it: pip install --upgrade 'tensorstore>=0.1.86'"
    if last in ("301", "307") or "AuthorizationHeaderMalformed" in codes:
        settings = f"{scheme.endpoint_settings}{scheme.instead_of_settings}"
        return f"the bucket {bucket!r} is in another region, or at another endpoint: set {settings}"
    if last in ("429", "503"):  # S3's SlowDown is the latter
        return "the store is busy, or asks for fewer requests: try again later, or from fewer processes at once"
    if last == "400" and codes.startswith(_UNKNOWN):
        settings = scheme.endpoint_settings
        return f"the credentials may have expired: renew them; or the bucket is in another region: set {settings}"
    if last.isdigit() and last.startswith("4"):
        return f"the store refused the request: check the URL, the credentials and {scheme.endpoint_settings}"
    return f"check the network and {scheme.endpoint}, and try again"
