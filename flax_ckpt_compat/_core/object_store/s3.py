"""Reach ``s3://``: Amazon's S3, and servers with its API.

S3 has deletions with a condition on the ETag since September 2025; TensorStore 0.1.86 sends none. Stores that ignore
the condition delete any version. Where botocore cannot ask, objects are deleted without one.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from flax_ckpt_compat._core.object_store import parts_upload, retrying, s3_requests
from flax_ckpt_compat._core.object_store.base_scheme import StoreScheme
from flax_ckpt_compat._core.object_store.s3_requests import OTHER_VERSION, NotPossibleError, RefusedError
from flax_ckpt_compat._core.progress import Meter

_log = logging.getLogger("flax_ckpt_compat")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
# S3-compatible servers may have no regions, but requests are signed with one.
_ANY_REGION = "us-east-1"


class S3(StoreScheme):
    """The scheme ``s3``."""

    tells_sizes = True
    needs_commit_file = False

    def bucket_spec(self, bucket: str) -> dict[str, Any]:
        """Return TensorStore's spec of a bucket, with endpoint and region from the AWS tools' environment variables."""
        spec = {"driver": "s3", "bucket": bucket}
        endpoint, region = _first_set(_ENDPOINTS), _first_set(_REGIONS)
        if endpoint:
            spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or _ANY_REGION}
        elif region:
            spec["aws_region"] = region
        return spec

    def deletes_versions(self) -> bool:
        """See `StoreScheme.deletes_versions`."""
        return s3_requests.is_installed()

    def delete_version(self, url: str, version: bytes) -> bool:
        """See `StoreScheme.delete_version`; without a condition, and True, where botocore cannot ask the store."""
        _, bucket, key = retrying.split(url)
        deleted = _delete_version(url, version, self.bucket_spec(bucket))
        if deleted is None:
            retrying.retry(url, "deleted", lambda: self.open(bucket).write(key, None))
        return deleted is not False

    def write_in_parts(self, url: str, content: Any, version: bytes, meter: Meter) -> bool | None:
        """See `StoreScheme.write_in_parts`."""
        return parts_upload.write(url, content, version, self.bucket_spec(retrying.split(url)[1]), meter)

    def unfinished_uploads(self, url: str) -> dict[str, float]:
        """See `StoreScheme.unfinished_uploads`."""
        return parts_upload.unfinished(url, self.bucket_spec(retrying.split(url)[1]))

    def abort_uploads(self, url: str, before: float) -> None:
        """See `StoreScheme.abort_uploads`."""
        parts_upload.abort_all(url, self.bucket_spec(retrying.split(url)[1]), before)


def _delete_version(url: str, version: bytes, spec: dict[str, Any]) -> bool | None:
    """Delete an object if it has this version, given the spec of its bucket.

    Return whether it had, or None where that cannot be asked."""
    if (etag := s3_requests.etag_of(version)) is None:
        return None
    try:
        s3_requests.send(
            url, "deleted", spec, lambda s3, bucket, key: s3.delete_object(Bucket=bucket, Key=key, IfMatch=etag)
        )
    except NotPossibleError as why:
        if str(why):
            _log.info("%s, and what follows, is deleted without a condition: %s", url, why)
        return None
    except RefusedError as refusal:
        if refusal.code in OTHER_VERSION:
            return False
        _log.info("%s is deleted without a condition: %s", url, refusal)
        return None
    return True


def _first_set(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
