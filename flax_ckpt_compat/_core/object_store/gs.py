"""Reach ``gs://``, Google Cloud Storage, by the client of gcsfs."""

from __future__ import annotations

import base64
import os
from typing import Any
from urllib.parse import quote

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store.client import ANSWER_SECONDS, CONNECT_SECONDS, FsspecClient, byte_range
from flax_ckpt_compat._core.storage import Stat

_ENDPOINTS = ("TENSORSTORE_GCS_HTTP_URL", "STORAGE_EMULATOR_HOST")
_TOKEN = "GOOGLE_AUTH_TOKEN_FOR_TESTING"  # noqa: S105  (which TensorStore takes, too)
_FIELDS = "name,size,generation,crc32c"


class GsClient(FsspecClient):
    """The scheme ``gs``."""

    package, extra, needs_commit_file = "gcsfs", "gcs", True
    variables = (*_ENDPOINTS, _TOKEN, "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT")

    def connect(self) -> Any:
        import aiohttp
        from gcsfs.core import GCSFileSystem  # the plain one: another looks for folders of its own
        from google.oauth2.credentials import Credentials

        token, endpoint = os.environ.get(_TOKEN), os.environ.get(_ENDPOINTS[0])
        return GCSFileSystem(
            token=Credentials(token) if token else None,  # type: ignore[no-untyped-call]
            endpoint_url=endpoint.rstrip("/") if endpoint else None,
            requests_timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS),
            skip_instance_cache=True,
        )

    async def _list(self, store: Any, bucket: str, prefix: str) -> dict[str, Stat]:
        found: dict[str, Stat] = {}
        asked = {"prefix": prefix, "fields": f"nextPageToken,items({_FIELDS})"}
        while True:
            page = await store._call("GET", "b/{}/o", bucket, json_out=True, **asked)
            found |= {one["name"]: _stat_of(one) for one in page.get("items", ())}
            if not page.get("nextPageToken"):
                return found
            asked["pageToken"] = page["nextPageToken"]

    async def _stat(self, store: Any, bucket: str, key: str) -> Stat:
        return _stat_of(await store._call("GET", "b/{}/o/{}", bucket, key, json_out=True, fields=_FIELDS))

    async def _read(
        self, store: Any, bucket: str, key: str, start: int, stop: int | None, version: str | None
    ) -> tuple[bytes, Stat | None]:
        asked = {"ifGenerationMatch": version} if version else {}
        headers = {"Range": byte_range(start, stop)} if start or stop is not None else {}
        told, found = await store._call("GET", "b/{}/o/{}", bucket, key, headers=headers, alt="media", **asked)
        size, version = told.get("Content-Range", "").rpartition("/")[2], told.get("x-goog-generation", "")
        is_told = version and (size.isdigit() or "Range" not in headers)
        return bytes(found), Stat(int(size or len(found)), version) if is_told else None

    async def _put(self, store: Any, bucket: str, key: str, data: bytes, version: str | None) -> str:
        asked = {} if version is None else {"ifGenerationMatch": version or "0"}
        found = await store._call(
            "POST",
            f"{store._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o",
            uploadType="media",
            name=key,
            headers={"Content-Type": "application/octet-stream"},
            data=data,
            json_out=True,
            **asked,
        )
        stat = _stat_of(found)
        if stat.crc32c not in (None, checksums.crc32c(data)):
            url = f"gs://{bucket}/{key}"
            message = f"{url}: its bytes were changed on their way; save it again with overwrite=True"
            raise StorageError(message, path=url)
        return stat.version

    async def _delete(self, store: Any, bucket: str, key: str, version: str | None) -> None:
        asked = {"ifGenerationMatch": version} if version else {}
        await store._call("DELETE", "b/{}/o/{}", bucket, key, **asked)


def _stat_of(fields: dict[str, Any]) -> Stat:
    crc32c = fields.get("crc32c")
    return Stat(
        int(fields.get("size") or 0),
        str(fields.get("generation", "")),
        int.from_bytes(base64.b64decode(crc32c)) if crc32c else None,
    )
