"""Reach ``az://``, Azure Blob Storage, by the client of adlfs."""

from __future__ import annotations

import os
from typing import Any

from flax_ckpt_compat._core.object_store.client import ABSENT, ANSWER_SECONDS, CONNECT_SECONDS, PART_BYTES, FsspecClient
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import Stat

_AT_ONCE = 8
_NAMES = (
    "CONNECTION_STRING",
    "ACCOUNT_NAME",
    "ACCOUNT_KEY",
    "SAS_TOKEN",
    "ANON",
    "CLIENT_ID",
    "CLIENT_SECRET",
    "TENANT_ID",
)
_IN_TIME = {"connection_timeout": CONNECT_SECONDS, "read_timeout": ANSWER_SECONDS}


class AzClient(FsspecClient):
    """The scheme ``az``; requests go through the client of Azure's own package, which adlfs opens."""

    package, extra, needs_commit_file = "adlfs", "az", False
    variables = tuple(f"AZURE_STORAGE_{name}" for name in _NAMES)

    def connect(self) -> Any:
        from adlfs import AzureBlobFileSystem

        return AzureBlobFileSystem(skip_instance_cache=True)

    async def _list(self, store: Any, bucket: str, prefix: str) -> dict[str, Stat]:
        container, found = store.service_client.get_container_client(bucket), {}
        async for one in container.list_blobs(name_starts_with=prefix, include=["metadata"], **_IN_TIME):
            if not (one.metadata or {}).get("hdi_isfolder"):  # how accounts with folders list one
                found[one.name] = Stat(one.size, one.etag.strip('"'))
        return found

    async def _stat(self, store: Any, bucket: str, key: str) -> Stat:
        found = await store.service_client.get_blob_client(bucket, key).get_blob_properties(**_IN_TIME)
        return Stat(found.size, found.etag.strip('"'))

    async def _read(
        self, store: Any, bucket: str, key: str, start: int, stop: int | None, version: str | None
    ) -> tuple[bytes, Stat | None]:
        blob = store.service_client.get_blob_client(bucket, key)
        length = None if stop is None else stop - start
        answer = await blob.download_blob(start, length, max_concurrency=1, **_condition(version), **_IN_TIME)
        told = answer.properties
        size, etag = str(told.content_range or "").rpartition("/")[2], told.etag.strip('"')
        return bytes(await answer.readall()), Stat(int(size), etag) if size.isdigit() else None

    async def _put(self, store: Any, bucket: str, key: str, data: Any, version: str | None) -> str:
        blob = store.service_client.get_blob_client(bucket, key)
        found = await blob.upload_blob(
            data, overwrite=version != ABSENT, max_concurrency=_AT_ONCE, **_condition(version), **_IN_TIME
        )
        return str(found["etag"]).strip('"')

    def put_file(self, url: str, path: str, version: str | None = None, meter: Meter = OFF) -> str:
        if os.path.getsize(path) <= PART_BYTES:  # a larger one is never in memory as a whole
            return super().put_file(url, path, version, meter)
        with open(path, "rb") as file:
            found: str = self._run(
                url, "written", lambda store, bucket, key: self._put(store, bucket, key, file, version)
            )
        meter.add(os.path.getsize(path), url)
        return found

    async def _delete(self, store: Any, bucket: str, key: str, version: str | None) -> None:
        await store.service_client.get_blob_client(bucket, key).delete_blob(**_condition(version), **_IN_TIME)


def _condition(version: str | None) -> dict[str, Any]:
    if not version:
        return {}
    from azure.core import MatchConditions

    return {"etag": f'"{version}"', "match_condition": MatchConditions.IfNotModified}
