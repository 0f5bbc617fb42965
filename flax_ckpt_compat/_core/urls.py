"""Split and normalize URLs of stores: ``scheme://bucket/key``."""

from __future__ import annotations

import posixpath
import re

from flax_ckpt_compat._core.errors import StorageError

_REFUSED = re.compile("[\0-\x1f\x7f\ud800-\udfff]")


def split_url(url: str) -> tuple[str, str, str]:
    """Split a URL into scheme, bucket and key; the key may be empty, and is not normalized."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise StorageError(f"{url} names no bucket; write {scheme.lower()}://bucket/folder", path=url)
    return scheme.lower(), bucket, key


def normal_url(url: str) -> str:
    """Normalize a user's URL: resolve ``.`` and ``..``, and remove redundant slashes."""
    scheme, bucket, key = split_url(url)
    if found := _REFUSED.search(url):
        message = f"{url!a} has the character {found[0]!a}, with which stores take no name, or change it; leave it out"
        raise StorageError(message, path=url)
    return f"{scheme}://{bucket}{posixpath.normpath('/' + key.lstrip('/'))}".rstrip("/")
