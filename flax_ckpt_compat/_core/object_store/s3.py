"""Reach ``s3://``: Amazon's S3, and servers with its API."""

from __future__ import annotations

import os
from typing import Any

from flax_ckpt_compat._core.object_store import requests

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
# S3-compatible servers may have no regions, but requests are signed with one.
_ANY_REGION = "us-east-1"


class S3:
    """The scheme ``s3``.

    Attributes:
        tells_sizes: an error for a range beyond the end of an object has its size.
        needs_commit_file: a directory without ``commit_success.txt`` is incomplete.
    """

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

    def open(self, bucket: str) -> Any:
        """Open a bucket as a TensorStore ``KvStore``."""
        return requests.open_bucket(tuple(self.bucket_spec(bucket).items()))

    def list_keys(self, url: str, start: bytes, stop: bytes) -> list[bytes]:
        """List all keys of the URL's bucket from ``start`` up to ``stop``; b"" stands for the end of the bucket."""
        return self.list_once(url, start, stop)

    def list_once(self, url: str, start: bytes, stop: bytes) -> list[bytes]:
        """List keys by TensorStore; see `list_keys`."""
        import tensorstore as ts

        key_range, bucket = ts.KvStore.KeyRange(start, stop), requests.split(url)[1]
        names: list[bytes] = requests.retry(url, "listed", lambda: self.open(bucket).list(key_range))
        return names


def _first_set(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
