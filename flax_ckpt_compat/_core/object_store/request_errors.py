"""Translate the errors of fsspec's clients into ours, with reason and remedy."""

from __future__ import annotations

import errno
import re

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.storage_errors import not_found

_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_ENDPOINT = {
    "s3": "AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "STORAGE_EMULATOR_HOST",
    "az": "AZURE_STORAGE_CONNECTION_STRING",
}
_NO_CREDENTIALS = re.compile(
    r"NoCredentials|PartialCredentials|CredentialRetrieval|DefaultCredentials|ProfileNotFound|Must provide"
)
_EXPIRED = re.compile(r"Expired|InvalidToken|TokenRefreshRequired|Invalid Credentials|invalid_grant|RefreshError")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|InvalidBucketName|bucket name|InvalidResourceName")
_ELSEWHERE = re.compile(r"AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocationConstraint")
_NO_WORD, _MISSING, _UNAUTHORIZED, _DENIED, _BUSY = 400, 404, 401, 403, (429, 503)
_CONFLICTS = (409, 412)  # another version, or another writer at this moment
OUT_OF_RANGE = 416


class ConflictError(StorageError):
    """An object does not have the version that a request was to read, replace or delete."""


def status_of(error: BaseException) -> int:
    """Return the HTTP status of a client's error; 0 if it is of none."""
    if isinstance(error, FileNotFoundError):
        return _MISSING
    if isinstance(error, FileExistsError):
        return _CONFLICTS[1]
    if isinstance(error, PermissionError) or "Forbidden" in str(error):
        return _DENIED
    answer = getattr(error, "response", None)  # of botocore
    if isinstance(answer, dict):
        return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    found = getattr(error, "status_code", None) or getattr(error, "code", None)  # of Azure, of gcsfs
    return int(str(found)) if str(found).isdigit() else 0


def has_expired(error: Exception) -> bool:
    """Return whether a store says that the credentials have expired; to HEAD, S3 answers 400 without a word."""
    return bool(_EXPIRED.search(f"{type(error).__name__}: {error}")) or status_of(error) == _NO_WORD


def translate(error: Exception, scheme: str, url: str, bucket: str, doing: str) -> Exception:
    """Return our error for a client's; ``doing`` completes "could not be …"."""
    status, text = status_of(error), f"{type(error).__name__}: {error}"
    if status in _CONFLICTS:
        return ConflictError(f"{url} was replaced or removed meanwhile; open it again", path=url, errno=errno.ESTALE)
    is_missing_bucket = _NO_BUCKET.search(text) or (doing == "listed" and status == _MISSING)
    if status == _MISSING and not is_missing_bucket:
        return not_found(url)
    reason = str(error).partition("\n")[0][:300] or type(error).__name__
    remedy = f"check the network and {_ENDPOINT[scheme]}, and try again"
    if is_missing_bucket:
        remedy = f"there is no bucket {bucket!r}, or not at this endpoint: create it, or correct the URL"
    elif _EXPIRED.search(text):
        remedy = f"the credentials have expired or are not valid: renew them, or {_CREDENTIALS[scheme]}"
    elif _NO_CREDENTIALS.search(text) or status == _UNAUTHORIZED:
        remedy = f"give credentials: {_CREDENTIALS[scheme]}"
    elif _ELSEWHERE.search(text):
        remedy = f"the bucket {bucket!r} is in another region, or at another endpoint: set {_ENDPOINT[scheme]}"
    elif status == _DENIED:
        remedy = f"the credentials do not permit this in the bucket {bucket!r}: {_CREDENTIALS[scheme]}"
    elif status == _NO_WORD and "HeadObject" in text:
        remedy = (
            f"the credentials may have expired: renew them; or the bucket is in another region: set {_ENDPOINT[scheme]}"
        )
    elif status in _BUSY:
        remedy = "the store is busy, or asks for fewer requests: try again later, or from fewer processes at once"
    elif status and status < 500:
        remedy = f"the store refused the request: check the URL, the credentials and {_ENDPOINT[scheme]}"
    elif isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        reason = "it did not answer in time"
    return StorageError(f"{url} could not be {doing}: {reason}; {remedy}", path=url)
