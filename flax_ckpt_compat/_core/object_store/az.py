"""Reach ``az://``, Azure Blob Storage, by the client of adlfs."""

from __future__ import annotations

from typing import Any, BinaryIO

from flax_ckpt_compat._core.object_store.client import ABSENT, ANSWER_SECONDS, CONNECT_SECONDS, FsspecClient, Key
from flax_ckpt_compat._core.storage import Stat

_AT_ONCE = 8
_IN_TIME = {"connection_timeout": CONNECT_SECONDS, "read_timeout": ANSWER_SECONDS}


class AzClient(FsspecClient):
    """The scheme ``az``; requests go through the client of Azure's own package, which adlfs opens."""

    package, extra, variables = "adlfs", "az", ("AZURE_STORAGE_",)
    credentials = "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
    endpoint = "AZURE_STORAGE_CONNECTION_STRING"

    def connect(self) -> Any:
        from adlfs import AzureBlobFileSystem

        return AzureBlobFileSystem(skip_instance_cache=True)

    async def _list(self, key: Key, prefix: str) -> dict[str, Stat]:
        container, found = key.store.service_client.get_container_client(key.bucket), {}
        async for one in container.list_blobs(name_starts_with=prefix, include=["metadata"], **_IN_TIME):
            if not (one.metadata or {}).get("hdi_isfolder"):  # how accounts with folders list one
                found[one.name] = Stat(one.size, one.etag.strip('"'))
        return found

    async def _stat(self, key: Key) -> Stat:
        found = await _blob(key).get_blob_properties(**_IN_TIME)
        return Stat(found.size, found.etag.strip('"'))

    async def _read(self, key: Key, start: int, stop: int | None, version: str | None) -> tuple[bytes, Stat | None]:
        length = None if stop is None else stop - start
        answer = await _blob(key).download_blob(start, length, max_concurrency=1, **_condition(version), **_IN_TIME)
        told = answer.properties
        size, etag = str(told.content_range or "").rpartition("/")[2], told.etag.strip('"')
        return bytes(await answer.readall()), Stat(int(size), etag) if size.isdigit() else None

    async def _put(self, key: Key, file: BinaryIO, version: str | None) -> str:
        found = await _blob(key).upload_blob(
            file, overwrite=version != ABSENT, max_concurrency=_AT_ONCE, **_condition(version), **_IN_TIME
        )
        return str(found["etag"]).strip('"')

    async def _delete(self, key: Key, version: str | None) -> None:
        await _blob(key).delete_blob(**_condition(version), **_IN_TIME)


def _blob(key: Key) -> Any:
    return key.store.service_client.get_blob_client(key.bucket, key.name)


def _condition(version: str | None) -> dict[str, Any]:
    if not version:
        return {}
    from azure.core import MatchConditions

    return {"etag": f'"{version}"', "match_condition": MatchConditions.IfNotModified}
