"""Write a large object of ``s3://`` in parts, by several connections at once (S3's multipart uploads).

The object appears whole when the upload is completed, which has the version that it replaces as its condition. S3 keeps
that condition since November 2024. Of another store it is tried out first, with a small object of its own; a store that
ignores it gets the object in one request, whose condition TensorStore sends.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import posixpath
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import retrying, s3_requests
from flax_ckpt_compat._core.object_store.s3_requests import OTHER_VERSION, NotPossibleError, RefusedError
from flax_ckpt_compat._core.orbax_layout import BEGUN
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.thread_pools import in_parallel

if TYPE_CHECKING:  # listings of checkpoints do without it
    import numpy as np

_log = logging.getLogger("flax_ckpt_compat")
_MAX_PARTS = 10_000
_PART_BYTES = 16 * 2**20
_AT_ONCE = 16
# Conditions on an object that is there, and has no such ETag.
_CANNOT_HOLD = {"IfNoneMatch": "*", "IfMatch": '"00000000000000000000000000000000"'}
# The upload was completed by a try whose answer was lost, or has to begin again.
_ENDED = ("NoSuchUpload", "ConditionalRequestConflict", "409")


def write(url: str, content: np.ndarray[Any, Any], version: bytes, spec: dict[str, Any], meter: Meter) -> bool | None:
    """Write an object if it has this version; see `StoreScheme.write_in_parts`."""
    if not s3_requests.is_installed():
        return None
    etag = s3_requests.etag_of(version)
    condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
    try:
        if not _keeps(url, spec, next(iter(condition))):
            return None
        return _Upload(url, spec).write(content, condition, meter)
    except (NotPossibleError, RefusedError) as why:
        if str(why):
            _log.info("%s is written by one connection: %s", url, why)
        return None


class _Upload:
    """One multipart upload."""

    def __init__(self, url: str, spec: dict[str, Any], upload_id: str = ""):
        """Begin one, or go on with one that has this id."""
        self._url, self._spec = url, spec
        self._id = upload_id or str(self._send(lambda s3, name: s3.create_multipart_upload(**name))["UploadId"])

    def _send(self, request: Any, nbytes: int = 0) -> Any:
        def with_name(s3: Any, bucket: str, key: str) -> Any:
            return request(s3, {"Bucket": bucket, "Key": key})

        return s3_requests.send(self._url, "written", self._spec, with_name, nbytes)

    def write(self, content: np.ndarray[Any, Any], condition: Mapping[str, str], meter: Meter) -> bool:
        """Send all parts, and complete the upload on a condition; return whether it held. Else abort it."""
        size = max(_PART_BYTES, -(-content.nbytes // _MAX_PARTS))
        starts = range(0, content.nbytes, size)
        completed = False

        def send(start: int) -> str:
            etag = self._part(content[start : start + size], start // size + 1, size)
            meter.add(min(size, content.nbytes - start), os.path.basename(self._url))
            return etag

        try:
            etags = in_parallel(send, starts, _AT_ONCE)
            completed = self._complete(etags, condition)
        finally:
            if not completed:
                self.abort()
        return completed

    def _part(self, content: np.ndarray[Any, Any], number: int, size: int) -> str:
        def put(s3: Any, name: dict[str, str]) -> Any:
            return s3.upload_part(
                **name, UploadId=self._id, PartNumber=number, Body=_Body(content.data), ContentLength=content.nbytes
            )

        return str(self._send(put, size)["ETag"])

    def _complete(self, etags: list[str], condition: Mapping[str, str]) -> bool:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]

        def complete(s3: Any, name: dict[str, str]) -> bool:
            try:
                s3.complete_multipart_upload(**name, UploadId=self._id, MultipartUpload={"Parts": parts}, **condition)
            except s3.exceptions.ClientError as error:
                if error.response["Error"].get("Code") in (*OTHER_VERSION, *_ENDED):
                    return False
                raise
            return True

        return bool(self._send(complete))

    def abort(self) -> None:
        """Delete its parts, if the store lets us."""
        try:
            self._send(lambda s3, name: s3.abort_multipart_upload(**name, UploadId=self._id))
        except (NotPossibleError, RefusedError, StorageError) as error:
            if not (isinstance(error, RefusedError) and error.code == "NoSuchUpload"):
                _log.warning("Cannot delete the parts of a failed upload of %s: %s", self._url, error)


class _Body(io.RawIOBase):
    """Memory as a file, which botocore sends without a copy of all of it."""

    def __init__(self, content: memoryview):
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._content)}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        part = self._content[self._at : self._at + len(target)]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)


_tried: dict[tuple[str, str, str], bool] = {}  # endpoint, bucket and kind of condition → whether the store keeps it


def _keeps(url: str, spec: dict[str, Any], kind: str) -> bool:
    """Return whether a store completes no upload whose condition of this kind does not hold; S3 itself is known to."""
    if "endpoint" not in spec:
        return True
    key = spec["endpoint"], spec["bucket"], kind
    if key not in _tried:
        _tried[key] = _refuses(url, spec, kind)
    return _tried[key]


def _refuses(url: str, spec: dict[str, Any], kind: str) -> bool:
    """Let an upload replace an object on a condition that does not hold; return whether the store refuses that.

    The object is a marker, in a folder that no look-up takes for a checkpoint: if this process dies meanwhile, the
    folder is removed as one of a dead writer."""
    unique = uuid.uuid4().hex
    probe = f"{posixpath.dirname(url)}/_{unique}.probe/{BEGUN}.{int(time.time())}.{unique}"

    def put(s3: Any, bucket: str, key: str) -> None:
        s3.put_object(Bucket=bucket, Key=key, Body=b"")

    def delete(s3: Any, bucket: str, key: str) -> None:
        s3.delete_object(Bucket=bucket, Key=key)

    import numpy as np

    s3_requests.send(probe, "written", spec, put)
    try:
        refuses = not _Upload(probe, spec).write(np.zeros(1, np.uint8), {kind: _CANNOT_HOLD[kind]}, OFF)
    finally:
        s3_requests.send(probe, "deleted", spec, delete)
    if not refuses:
        _log.info("%s ignores conditions on uploads in parts, so files are sent by one connection", spec["endpoint"])
    return refuses


def unfinished(url: str, spec: dict[str, Any]) -> dict[str, float]:
    """Return what `StoreScheme.unfinished_uploads` does; nothing where it cannot be asked."""
    found: dict[str, float] = {}
    prefix = f"{retrying.key_of(url)}/".removeprefix("/")
    for upload in _listed(url, prefix, spec):
        name, began = upload["Key"][len(prefix) :], upload["Initiated"].timestamp()
        if name and "/" not in name:
            found[name] = min(began, found.get(name, began))
    return found


def abort_all(url: str, spec: dict[str, Any], before: float) -> None:
    """Delete the parts of unfinished uploads of an object that began before a time."""
    for upload in _listed(url, retrying.key_of(url), spec):
        if upload["Key"] == retrying.key_of(url) and upload["Initiated"].timestamp() < before:
            _Upload(url, spec, upload["UploadId"]).abort()


def _listed(url: str, prefix: str, spec: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the unfinished uploads of all keys that begin with a prefix."""
    if not s3_requests.is_installed():
        return
    after: dict[str, str] = {}
    with suppress(NotPossibleError, RefusedError):
        while True:
            page = s3_requests.send(
                url,
                "listed",
                spec,
                functools.partial(_list_page, prefix, after),
            )
            yield from page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return
            after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _list_page(prefix: str, after: Mapping[str, str], s3: Any, bucket: str, _: str) -> Any:
    return s3.list_multipart_uploads(Bucket=bucket, Prefix=prefix, **after)
