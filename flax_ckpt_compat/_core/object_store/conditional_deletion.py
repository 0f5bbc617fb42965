"""Delete one version of an object of ``s3://``.

S3 has deletions with a condition on the ETag since September 2025; TensorStore 0.1.86 sends none. Stores that ignore
the condition delete any version. Where botocore cannot ask, the caller deletes without one.
"""

from __future__ import annotations

import logging
from typing import Any

from flax_ckpt_compat._core.object_store import s3_requests
from flax_ckpt_compat._core.object_store.s3_requests import OTHER_VERSION, NotPossibleError, RefusedError

_log = logging.getLogger("flax_ckpt_compat")


def delete_version(url: str, version: bytes, spec: dict[str, Any]) -> bool | None:
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
