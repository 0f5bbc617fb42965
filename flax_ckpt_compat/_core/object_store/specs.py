"""URLs of object stores → what TensorStore is told of them."""

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
# Servers of other makers know no regions, but requests are signed with one.
_ANY_REGION = "us-east-1"
_RETRIES = {"max_retries": 10, "initial_delay": "100ms", "max_delay": "4s"}  # some 25 s in all


def split(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and key of a URL; the key may be empty, and keeps its form, which may be anything in a store.

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
    """The URL that a user's means: without ``.``, ``..`` and slashes that are not needed.

    Raises:
        StorageError: an unknown scheme, or no bucket.
    """
    scheme, bucket, key = split(url)
    return f"{scheme}://{bucket}{posixpath.normpath('/' + key.lstrip('/'))}".rstrip("/")


def bucket_spec(scheme: str, bucket: str) -> dict[str, Any]:
    """TensorStore's description of a whole bucket; the AWS tools' environment variables count."""
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
    """Where TensorStore sends requests for ``gs://``, without a slash at the end."""
    return (os.environ.get("TENSORSTORE_GCS_HTTP_URL") or "https://storage.googleapis.com").rstrip("/")


def _first_set(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def spec(url: str) -> dict[str, Any]:
    """TensorStore's description of the folder ``url``, as the base of an array or of a database."""
    scheme, bucket, key = split(url)
    found, folder = bucket_spec(scheme, bucket), views.parent(key)
    if folder is not None:  # the manifest is the only file of a database whose name another one has too
        manifest = {"base": found | {"path": f"{key.removesuffix('/')}/{MANIFEST}"}, "exact": MANIFEST}
        data = {"base": found | {"path": f"{folder}/"}}
        return {"driver": "kvstack", "layers": [data, manifest | {"strip_prefix": len(MANIFEST)}], "path": ""}
    return found | {"path": key.removesuffix("/") + "/"} if key else found


@functools.cache
def context() -> Any:
    """The TensorStore context whose connections and retries all requests share."""
    import tensorstore as ts  # heavy, and needed for stores alone

    return ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})


def bucket_store(url: str) -> Any:
    """The opened bucket of a URL: a TensorStore ``KvStore``."""
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
