"""Reach ``gs://``, Google Cloud Storage, by the client of gcsfs."""

from __future__ import annotations

import base64
import os
from typing import Any, BinaryIO
from urllib.parse import quote

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store.client import ANSWER_SECONDS, CONNECT_SECONDS, FsspecClient, Key, byte_range
from flax_ckpt_compat._core.storage import Stat

_ENDPOINT = "TENSORSTORE_GCS_HTTP_URL"
_TOKEN = "GOOGLE_AUTH_TOKEN_FOR_TESTING"  # noqa: S105  (which TensorStore takes, too)
_OBJECT = "b/{}/o/{}"
_FIELDS = "name,size,generation,crc32c"


class GsClient(FsspecClient):
    """The scheme ``gs``."""

    package, extra, needs_commit_file = "gcsfs", "gcs", True
    variables = (_ENDPOINT, "STORAGE_EMULATOR_HOST", "GOOGLE_")
    credentials = "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"
    endpoint = "STORAGE_EMULATOR_HOST"

    def connect(self) -> Any:
        import aiohttp
        from gcsfs.core import GCSFileSystem  # the plain one: another looks for folders of its own
        from google.oauth2.credentials import Credentials

        token, endpoint = os.environ.get(_TOKEN), os.environ.get(_ENDPOINT)
        return GCSFileSystem(
            token=Credentials(token) if token else None,  # type: ignore[no-untyped-call]
            endpoint_url=endpoint.rstrip("/") if endpoint else None,
            requests_timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS),
            skip_instance_cache=True,
        )

    async def _list(self, key: Key, prefix: str) -> dict[str, Stat]:
        found: dict[str, Stat] = {}
        asked = {"prefix": prefix, "fields": f"nextPageToken,items({_FIELDS})"}
        while True:
            page = await key.store._call("GET", "b/{}/o", key.bucket, json_out=True, **asked)
            found |= {one["name"]: _stat_of(one) for one in page.get("items", ())}
            if not page.get("nextPageToken"):
                return found
            asked["pageToken"] = page["nextPageToken"]

    async def _stat(self, key: Key) -> Stat:
        return _stat_of(await key.store._call("GET", _OBJECT, key.bucket, key.name, json_out=True, fields=_FIELDS))

    async def _read(self, key: Key, start: int, stop: int | None, version: str | None) -> tuple[bytes, Stat | None]:
        headers = {"Range": byte_range(start, stop)} if start or stop is not None else {}
        asked = {"headers": headers, "alt": "media", **_condition(version)}
        told, found = await key.store._call("GET", _OBJECT, key.bucket, key.name, **asked)
        size, version = told.get("Content-Range", "").rpartition("/")[2], told.get("x-goog-generation", "")
        is_told = version and (size.isdigit() or not headers)
        return bytes(found), Stat(int(size or len(found)), version) if is_told else None

    async def _put(self, key: Key, file: BinaryIO, version: str | None) -> str:
        data, bucket = file.read(), quote(key.bucket, safe="")
        found = await key.store._call(
            "POST",
            f"{key.store._location}/upload/storage/v1/b/{bucket}/o",
            uploadType="media",
            name=key.name,
            headers={"Content-Type": "application/octet-stream"},
            data=data,
            json_out=True,
            **_condition(version),
        )
        stat = _stat_of(found)
        if stat.crc32c not in (None, checksums.crc32c(data)):
            url = f"gs://{key.bucket}/{key.name}"
            message = f"{url}: its bytes were changed on their way; save it again with overwrite=True"
            raise StorageError(message, path=url)
        return stat.version

    async def _delete(self, key: Key, version: str | None) -> None:
        await key.store._call("DELETE", _OBJECT, key.bucket, key.name, **_condition(version))


def _condition(version: str | None) -> dict[str, str]:
    return {} if version is None else {"ifGenerationMatch": version or "0"}


def _stat_of(fields: dict[str, Any]) -> Stat:
    crc32c = fields.get("crc32c")
    return Stat(
        int(fields.get("size") or 0),
        str(fields.get("generation", "")),
        int.from_bytes(base64.b64decode(crc32c)) if crc32c else None,
    )
