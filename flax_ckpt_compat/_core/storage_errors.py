"""Translate errors of the file system, of TensorStore and of object stores into ours, with reason and remedy."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from flax_ckpt_compat._core.errors import CheckpointError, CorruptCheckpointError, StorageError, storage_error_of
from flax_ckpt_compat._core.signal_handler_errors import is_of_handler
from flax_ckpt_compat._core.text_formatting import format_size
from flax_ckpt_compat._core.tree import Node, iter_leaves

_REMEDIES = {
    errno.EACCES: "check the permissions of {folder}",
    errno.EPERM: "check the permissions of {folder}",
    errno.EROFS: "{folder} is mounted read-only; save to another directory",
    errno.EMFILE: "this process has too many files open; close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "the machine has too many files open; close some",
    errno.EFBIG: "a file would be larger than the limit of this process (ulimit -f) or of the file system",
    errno.ENOTDIR: "a part of this path is no directory; check the path",
    errno.ELOOP: "a part of this path is a link that leads to itself; check the path",
    errno.EIO: "the disk or the network file system failed; check it, or save to another directory",
}
# FAT, exFAT and NTFS refuse these characters in names, with one of these errors; so do SMB servers.
_NOT_ON_WINDOWS = re.compile(r'[<>:"\\|?*]')
_REFUSED_NAME = (errno.EINVAL, errno.ENOENT)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
_DENIED = (errno.EACCES, errno.EPERM)
TENSORSTORE_ERRORS = (ValueError, RuntimeError, OSError)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'|\[OS error (\d+):")
_TRANSIENT_CODES = ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "ABORTED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
_REFUSED_CODES = ("PERMISSION_DENIED", "UNAUTHENTICATED")
_MARGIN = 2**20  # bytes
_LOOKS = ("found", "listed", "read")
_CHECK_PATH = "check the path, and the disk or network file system that it is on"
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
_ENDPOINT_SETTINGS = {"s3": "AWS_REGION and AWS_ENDPOINT_URL", "gs": "TENSORSTORE_GCS_HTTP_URL"}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (for SSO, see `aws configure "
    "export-credentials`)",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
}


class translated:  # noqa: N801  (a function that returns a context; each look-up enters one, so it is no generator)
    """Translate lower errors, such as `TENSORSTORE_ERRORS`, into StorageError; see `storage_error`.

    Errors of this library tell already what happened, such as that the source of a conversion is damaged."""

    __slots__ = ("_doing", "_kinds", "_path")

    def __init__(self, path: str, doing: str = "", kinds: tuple[type[Exception], ...] = (OSError,)):
        self._path, self._doing, self._kinds = path, doing, kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if not isinstance(error, self._kinds) or isinstance(error, CheckpointError) or is_of_handler(error):
            return
        raise storage_error(self._path, error, self._doing) from error


def is_denied(error: StorageError) -> bool:
    """Return whether the system refused access, which tells nothing about what is beside the path."""
    return error.errno in _DENIED


def storage_error(path: str, error: Exception, doing: str = "") -> StorageError:
    """Return the StorageError for an error of the file system, or of TensorStore on it.

    ``doing`` completes "could not be …"."""
    if isinstance(error, StorageError):
        return error
    number = _number_of(error)
    message = f"{path} could not be {doing}: " if doing else f"{path}: "
    message += str(getattr(error, "strerror", None) or error)
    if number in _DENIED:
        message += f"; check the permissions of it and of {os.path.dirname(path)}"
    elif number in _REMEDIES:
        message += f"; {_REMEDIES[number].format(folder=os.path.dirname(path))}"
    elif number in FULL_DISK:
        message += "; free space, or, where there is some, remove files (df -i), or save to another directory"
    elif number == errno.EXDEV:
        message += (
            "; on overlayfs, a directory of a lower layer, such as that of a container's image, cannot be replaced: "
            "save to another directory, or remove this one first"
        )
    elif number == errno.ENAMETOOLONG:
        message += "; shorten the path, to which up to 255 bytes are added while it is written"
    elif doing in _LOOKS and "://" not in path:
        is_gone = number == errno.ENOENT
        message += f"; {'it was removed meanwhile, or was never there' if is_gone else _CHECK_PATH}"
    elif doing:
        message += "; check the disk's space and permissions"
        if "://" in path:
            message = message.rpartition(";")[0] + "; nothing else may change what is there meanwhile; try again"
    elif number == errno.ENOENT:  # also where a file system takes no new names, such as /proc
        message += f"; check that {os.path.dirname(path)} exists and that files can be created in it"
    else:
        message += f"; {_CHECK_PATH}"
    return storage_error_of(message, path=path, errno=number)


def _number_of(error: Exception) -> int | None:
    """Return the operating system's error number, which TensorStore has in its text only."""
    number: int | None = getattr(error, "errno", None)
    found = _OS_ERROR.search(str(error)) if number is None else None
    return int(found[1] or found[2]) if found else number


@contextmanager
def read_errors(
    path: str, damaged: Callable[[Exception], Exception], kinds: tuple[type[Exception], ...]
) -> Iterator[None]:
    """Translate TensorStore's errors of reading: what the system refused into StorageError, others by ``damaged``.

    A file that is missing, or a directory in its place, is damage of the checkpoint."""
    try:
        yield
    except (CorruptCheckpointError, StorageError):
        raise
    except kinds as error:
        is_refused = _number_of(error) not in (None, *_NO_FILE)  # which tells nothing about what the files hold
        raise (storage_error(path, error, "read") if is_refused else damaged(error)) from error


@contextmanager
def writing(path: str, temporary: str, tree: Node = None) -> Iterator[None]:
    """Translate an OSError, or a StorageError about a temporary, into a StorageError about the checkpoint.

    With ``tree`` it reports the space that the tree needs."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError) and not isinstance(error, StorageError):
            raise  # such as ProcessTimeoutError, which is an OSError because it is a TimeoutError
        if is_of_handler(error):
            raise
        raise _storage_error(path, temporary, tree, error) from (error.__cause__ or error)


def _storage_error(path: str, temporary: str, tree: Node, error: OSError) -> StorageError:
    folder = os.path.dirname(temporary)
    number = error.errno
    if number in FULL_DISK:
        reason, remedy = os.strerror(number), f"{_space(temporary, tree)}; free space, or save to another directory"
        if folder != os.path.dirname(path):  # a save to a store
            remedy = f"{_space(temporary, tree)}, where the checkpoint is prepared; free space, or set TMPDIR"
    elif number in _REMEDIES:
        reason, remedy = os.strerror(number), _REMEDIES[number].format(folder=folder)
    elif (
        number in _REFUSED_NAME
        and os.path.isdir(folder)
        and (refused := _NOT_ON_WINDOWS.search(os.path.basename(path)))
    ):
        reason = os.strerror(number)
        remedy = f"the file system of {folder} may not take {refused[0]!r} in names: choose another prefix or directory"
    else:
        reason, remedy = str(error).replace(temporary, path), ""
    if reason.startswith(path):
        return storage_error_of(reason, path=path, errno=number)
    message = f"{path} could not be saved: {reason}{'; ' + remedy if remedy else ''}"
    return storage_error_of(message, path=path, errno=number)


def _space(temporary: str, tree: Node) -> str:
    """Describe the space needed, and the space free once the temporary is removed."""
    folder = os.path.dirname(temporary)
    needed = f"it needs {format_size(_nbytes(tree))} and " if tree is not None else ""
    with suppress(OSError):
        free = shutil.disk_usage(folder).free + _disk_space(temporary)
        # Files take a little more than their leaves.
        is_enough = tree is not None and free > 2 * _nbytes(tree) + _MARGIN
        other = ", so what is used up is a quota, or the number of files (df -i)" if is_enough else ""
        return f"{needed}{format_size(free)} are free in {folder}{other}"
    return f"{needed}nothing is free in {folder}"


def _disk_space(path: str) -> int:
    """Return the disk usage of a file or of the files below a directory, in bytes."""
    block = 512  # bytes, whatever the file system's blocks are (POSIX)
    with suppress(NotADirectoryError, FileNotFoundError):
        return sum(_disk_space(entry.path) for entry in os.scandir(path))
    with suppress(OSError):
        return os.lstat(path).st_blocks * block
    return 0


def _nbytes(tree: Node) -> int:
    return sum(_size_of(leaf) for _, leaf in iter_leaves(tree))


def _size_of(leaf: Any) -> int:
    leaf = getattr(leaf, "data", leaf) if not hasattr(leaf, "nbytes") else leaf
    return int(getattr(leaf, "nbytes", 0)) or (len(leaf) if isinstance(leaf, (str, bytes)) else 0)


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
    if reason.endswith(_UNKNOWN) and status:
        reason = f"the store answered HTTP {status} and gave no reason"
    return store_error(url, operation, reason, f"{text} {_STATUS_OF_CODE.get(code, status)}")


def store_error(url: str, operation: str, reason: str, codes: str) -> StorageError:
    """Return the error for a failed request.

    ``codes`` selects the remedy: text with error names and, as its last word, the HTTP status."""
    scheme, _, rest = url.partition("://")
    remedy = _remedy(scheme.lower(), rest.partition("/")[0], codes)
    return StorageError(f"{url} could not be {operation}: {reason}; {remedy}", path=url)


def _remedy(scheme: str, bucket: str, codes: str) -> str:
    last = codes.rpartition(" ")[2]
    if "bucket name" in codes or "InvalidBucketName" in codes:
        rule = "3 to 63 lower-case letters, digits, dots and hyphens" + ("" if scheme == "s3" else ", and underscores")
        return f"{bucket!r} cannot be the name of a bucket ({rule}): correct the URL, {scheme}://bucket/folder"
    if re.search("Invalid (S3|GCS) object name", codes):
        return "no object can have this name: change the directory, prefix or step"
    if re.search("etag not found|Malformed List response", codes):
        return f"this is not an answer of a store: check the proxy before it, and {_ENDPOINT_SETTINGS[scheme]}"
    if "NoSuchBucket" in codes or last == "404":
        return f"there is no bucket {bucket!r}, or not at this endpoint: create it, or correct the URL"
    if _EXPIRED.search(codes) or (scheme == "gs" and last == "401"):
        return f"the credentials have expired or are not valid: renew them, or {_CREDENTIALS[scheme]}"
    if "redentials" in codes or last == "401":
        return f"give credentials: {_CREDENTIALS[scheme]}"
    if "TimeTooSkewed" in codes:
        return "set the clock of this machine: requests are signed with the time"
    if _DAMAGED_UPLOAD.search(codes):
        return "the bytes were changed in transit, several times: check the proxy before the store, and this machine"
    if last == "403" or "AccessDenied" in codes:
        return f"there are no credentials, or they do not permit this in the bucket {bucket!r}: {_CREDENTIALS[scheme]}"
    if "peer certificate" in codes:
        return "set TENSORSTORE_CA_BUNDLE to the file with the certificate of its authority, or correct the endpoint"
    if "is not registered" in codes:
        return "this build of tensorstore has no driver for it: pip install --upgrade 'tensorstore>=0.1.86'"
    if last in ("301", "307") or "AuthorizationHeaderMalformed" in codes:
        settings = _ENDPOINT_SETTINGS[scheme] + (", or neither, so that the bucket is asked" if scheme == "s3" else "")
        return f"the bucket {bucket!r} is in another region, or at another endpoint: set {settings}"
    if last in ("429", "503"):  # S3's SlowDown is the latter
        return "the store is busy, or asks for fewer requests: try again later, or from fewer processes at once"
    if last == "400" and codes.startswith(_UNKNOWN):
        settings = _ENDPOINT_SETTINGS[scheme]
        return f"the credentials may have expired: renew them; or the bucket is in another region: set {settings}"
    if last.isdigit() and last.startswith("4"):
        return f"the store refused the request: check the URL, the credentials and {_ENDPOINT_SETTINGS[scheme]}"
    return "check the network and the endpoint" + (" (AWS_ENDPOINT_URL)" if scheme == "s3" else "") + ", and try again"
