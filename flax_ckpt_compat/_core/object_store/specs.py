"""Convert URLs of object stores to TensorStore specs."""

from __future__ import annotations

import functools
import os
import posixpath
import re
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import views
from flax_ckpt_compat._core.orbax_layout import MANIFEST

_URL = re.compile(r"([A-Za-z][A-Za-z0-9.+-]*)://([^/]*)(.*)", re.DOTALL)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
# S3-compatible servers may have no regions, but requests are signed with one.
_ANY_REGION = "us-east-1"
_RETRIES = {"max_retries": 10, "initial_delay": "100ms", "max_delay": "4s"}  # some 25 s in all


def split(url: str) -> tuple[str, str, str]:
    """Split a URL into scheme, bucket and key; the key may be empty, and is not normalized.

    Raises:
        StorageError: an unknown scheme, or no bucket.
    """
    match = _URL.fullmatch(url)
    scheme = match[1].lower() if match else ""
    if match is None or scheme not in ("s3", "gs"):
        known = "s3:// and gs:// URLs and local paths"
        raise StorageError(f"{url}: the scheme {scheme + '://'!r} is unknown; {known} can be used", path=url)
    if not match[2]:
        raise StorageError(f"{url} names no bucket; write {scheme}://bucket/folder", path=url)
    return scheme, match[2], match[3].removeprefix("/")


def normal(url: str) -> str:
    """Normalize a user's URL: resolve ``.`` and ``..``, and remove redundant slashes.

    Raises:
        StorageError: an unknown scheme, or no bucket.
    """
    scheme, bucket, key = split(url)
    return f"{scheme}://{bucket}{posixpath.normpath('/' + key.lstrip('/'))}".rstrip("/")


def bucket_spec(scheme: str, bucket: str) -> dict[str, Any]:
    """Return TensorStore's spec of a bucket, with endpoint and region from the AWS tools' environment variables."""
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket}
    spec = {"driver": "s3", "bucket": bucket}
    endpoint, region = _first_set(_ENDPOINTS), _first_set(_REGIONS)
    if endpoint:
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or _ANY_REGION}
    elif region:
        spec["aws_region"] = region
    return spec


def gcs_endpoint() -> str:
    """Return TensorStore's endpoint for ``gs://``, without a final slash."""
    return (os.environ.get("TENSORSTORE_GCS_HTTP_URL") or "https://storage.googleapis.com").rstrip("/")


def _first_set(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def spec(url: str) -> dict[str, Any]:
    """Return TensorStore's spec of the folder ``url``, as the base of an array or of a database."""
    scheme, bucket, key = split(url)
    found, folder = bucket_spec(scheme, bucket), views.parent(key)
    if folder is not None:  # the manifest is the only file of a database whose name another one has too
        manifest = {"base": found | {"path": f"{key.removesuffix('/')}/{MANIFEST}"}, "exact": MANIFEST}
        data = {"base": found | {"path": f"{folder}/"}}
        return {"driver": "kvstack", "layers": [data, manifest | {"strip_prefix": len(MANIFEST)}], "path": ""}
    return found | {"path": key.removesuffix("/") + "/"} if key else found


@functools.cache
def context() -> Any:
    """Return the TensorStore context that all requests share."""
    import tensorstore as ts  # heavy, and needed for stores alone

    return ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})


def bucket_store(url: str) -> Any:
    """Open the bucket of a URL as a TensorStore ``KvStore``."""
    scheme, bucket, _ = split(url)
    return _open(tuple(bucket_spec(scheme, bucket).items()))


@functools.lru_cache(maxsize=64)
def _open(items: tuple[tuple[str, Any], ...]) -> Any:
    import tensorstore as ts

    if "byte_range" not in (ts.KvStore.read.__doc__ or ""):
        raise StorageError(
            f"object stores need a newer TensorStore, which reads parts of objects (0.1.86 does), to reach "
            f"{items[1][1]}; pip install -U tensorstore"
        )
    return ts.KvStore.open(dict(items), context=context()).result()
