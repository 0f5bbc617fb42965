"""Reach Amazon's S3, Google Cloud Storage and Azure Blob Storage by their clients of fsspec."""

from __future__ import annotations

import asyncio
import base64
import datetime
import os
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any, BinaryIO

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store.client import ABSENT, EXPIRES_AFTER, PART_BYTES, Client, Key
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.storage import Stat, split_url
from flax_ckpt_compat._core.thread_pools import in_parallel

CONNECT_SECONDS, ANSWER_SECONDS = 10, 30  # without a byte, before a request is tried again
_TRIES, _CONNECTIONS = 8, 64
_MOST_PARTS = 10_000  # of an object of S3
_ANY_REGION = "us-east-1"  # servers of others have no regions, but requests are signed with one
_FIELDS = "name,size,generation,crc32c"  # of Google's API
_IN_TIME = {"connection_timeout": CONNECT_SECONDS, "read_timeout": ANSWER_SECONDS}  # of Azure's


def _byte_range(start: int, stop: int | None) -> dict[str, str]:
    """Return the header that asks for a part of an object; none for all of it."""
    return {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"} if start or stop is not None else {}


class S3Client(Client):
    """The scheme ``s3``."""

    package, variables = "s3fs", ("AWS_",)
    access = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_REGION, AWS_ENDPOINT_URL"

    def connect(self) -> Any:
        import botocore.session
        import s3fs
        from aiobotocore.session import AioSession

        session = AioSession()
        # Lists have a time for each object, which takes longer to parse than all else of them.
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
        known = os.environ.get
        endpoint = known("AWS_ENDPOINT_URL_S3") or known("AWS_ENDPOINT_URL")
        region = known("AWS_REGION") or known("AWS_DEFAULT_REGION") or (_ANY_REGION if endpoint else None)
        return s3fs.S3FileSystem(
            session=session,
            anon=botocore.session.get_session().get_credentials() is None,
            client_kwargs={"region_name": region},
            config_kwargs={
                "retries": {"mode": "standard", "total_max_attempts": _TRIES},
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": ANSWER_SECONDS,
                "max_pool_connections": _CONNECTIONS,
            },
            cache_regions=region is None,
            skip_instance_cache=True,
        )

    async def _ask(self, key: Key, operation: str, version: str | None = None, **arguments: Any) -> Any:
        """Ask aiobotocore's client, in the region of the bucket, on the condition that an object has this version."""
        await key.store.set_session()
        s3 = await key.store.get_s3(key.bucket)
        if version is not None:
            arguments |= {"IfNoneMatch": "*"} if version == ABSENT else {"IfMatch": version}
        return await getattr(s3, operation)(Bucket=key.bucket, **arguments)

    async def _list(self, key: Key, prefix: str) -> dict[str, Stat]:
        await key.store.set_session()
        s3 = await key.store.get_s3(key.bucket)
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=key.bucket, Prefix=prefix)
        return {one["Key"]: Stat(one["Size"], one["ETag"]) async for page in pages for one in page.get("Contents", ())}

    async def _stat(self, key: Key) -> Stat:
        found = await self._ask(key, "head_object", Key=key.name)
        return Stat(found["ContentLength"], found["ETag"])

    async def _read(self, key: Key, start: int, stop: int | None, version: str | None) -> bytes:
        asked = _byte_range(start, stop)
        for left in reversed(range(_TRIES)):
            answer = await self._ask(key, "get_object", version, Key=key.name, **asked)
            try:
                async with answer["Body"] as body:
                    return bytes(await body.read())
            except Exception:  # the client itself tries again, but not once an answer has begun
                if not left:
                    raise
            await asyncio.sleep(0.1)
        raise AssertionError

    async def _put(self, key: Key, file: BinaryIO, version: str | None) -> str:
        return str((await self._ask(key, "put_object", version, Key=key.name, Body=file.read()))["ETag"])

    def write(self, url: str, file: BinaryIO, version: str | None, meter: Meter) -> str:
        """Write an object, a large one in parts: it appears with the last request."""
        size = file.seek(0, os.SEEK_END)
        if size <= PART_BYTES:
            return super().write(url, file, version, meter)
        part_bytes = max(PART_BYTES, -(-size // _MOST_PARTS))
        begun, reading = self._send(url, "create_multipart_upload")["UploadId"], threading.Lock()

        def send(number: int) -> dict[str, Any]:
            with reading:
                file.seek(number * part_bytes)
                data = file.read(part_bytes)
            etag = self._send(url, "upload_part", UploadId=begun, PartNumber=number + 1, Body=data)["ETag"]
            meter.add(len(data), url)
            return {"PartNumber": number + 1, "ETag": etag}

        try:
            parts = {"Parts": in_parallel(send, range(-(-size // part_bytes)), _CONNECTIONS)}
            whole = self._send(url, "complete_multipart_upload", version, UploadId=begun, MultipartUpload=parts)
            return str(whole["ETag"])
        except BaseException:
            with suppress(StorageError, FileNotFoundError):
                self._send(url, "abort_multipart_upload", UploadId=begun)
            raise

    def _send(self, url: str, operation: str, version: str | None = None, **arguments: Any) -> Any:
        return self._run(url, "written", self._ask, operation, version, Key=split_url(url)[2], **arguments)

    async def _delete(self, key: Key, version: str | None) -> None:
        await self._ask(key, "delete_object", version, Key=key.name)

    def stale_parts(self, url: str, abort: Collection[str] = ()) -> Collection[str]:
        found, prefix = [], split_url(f"{url}/")[2]
        answer = self._run(url, "listed", self._ask, "list_multipart_uploads", Prefix=prefix)
        for one in answer.get("Uploads", ()):
            if time.time() - datetime.datetime.fromisoformat(one["Initiated"]).timestamp() > EXPIRES_AFTER:
                found.append(one["Key"][len(prefix) :])
                if found[-1] in abort:
                    self._send(f"{url}/{found[-1]}", "abort_multipart_upload", UploadId=one["UploadId"])
        return found


class GsClient(Client):
    """The scheme ``gs``."""

    package, needs_commit_file = "gcsfs", True
    variables = ("TENSORSTORE_GCS_HTTP_URL", "STORAGE_EMULATOR_HOST", "GOOGLE_")
    access = "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS; STORAGE_EMULATOR_HOST"

    def connect(self) -> Any:
        import aiohttp
        from gcsfs.core import GCSFileSystem  # the plain one: another looks for folders of its own
        from google.oauth2.credentials import Credentials

        token, endpoint = map(os.environ.get, ("GOOGLE_AUTH_TOKEN_FOR_TESTING", "TENSORSTORE_GCS_HTTP_URL"))
        return GCSFileSystem(
            token=Credentials(token) if token else None,  # type: ignore[no-untyped-call]
            endpoint_url=endpoint.rstrip("/") if endpoint else None,
            requests_timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS),
            skip_instance_cache=True,
        )

    async def _ask(self, key: Key, method: str, version: str | None, path: str = "b/{}/o/{}", **more: Any) -> Any:
        """Ask for an object, on the condition that it has this version."""
        more |= {} if version is None else {"ifGenerationMatch": version or "0"}
        return await key.store._call(method, path, key.bucket, key.name, **more)

    async def _list(self, key: Key, prefix: str) -> dict[str, Stat]:
        found, asked = dict[str, Stat](), {"prefix": prefix, "fields": f"nextPageToken,items({_FIELDS})"}
        while True:
            page = await key.store._call("GET", "b/{}/o", key.bucket, json_out=True, **asked)
            found |= {one["name"]: _gs_stat(one) for one in page.get("items", ())}
            if not page.get("nextPageToken"):
                return found
            asked["pageToken"] = page["nextPageToken"]

    async def _stat(self, key: Key) -> Stat:
        return _gs_stat(await self._ask(key, "GET", None, json_out=True, fields=_FIELDS))

    async def _read(self, key: Key, start: int, stop: int | None, version: str | None) -> bytes:
        return bytes((await self._ask(key, "GET", version, headers=_byte_range(start, stop), alt="media"))[1])

    async def _put(self, key: Key, file: BinaryIO, version: str | None) -> str:
        data, path = file.read(), f"{key.store._location}/upload/storage/v1/b/{{}}/o"
        asked = {"uploadType": "media", "name": key.name, "headers": {"Content-Type": "application/octet-stream"}}
        found = _gs_stat(await self._ask(key, "POST", version, path, data=data, json_out=True, **asked))
        if found.crc32c not in (None, checksums.crc32c(data)):
            url = f"gs://{key.bucket}/{key.name}"
            message = f"{url}: its bytes were changed on their way; save it again with overwrite=True"
            raise StorageError(message, path=url)
        return found.version

    async def _delete(self, key: Key, version: str | None) -> None:
        await self._ask(key, "DELETE", version)


def _gs_stat(fields: dict[str, Any]) -> Stat:
    crc32c = fields.get("crc32c")
    number = int.from_bytes(base64.b64decode(crc32c)) if crc32c else None
    return Stat(int(fields.get("size") or 0), str(fields.get("generation", "")), number)


class AzClient(Client):
    """The scheme ``az``; requests go through the client of Azure's own package, which adlfs opens."""

    package, variables = "adlfs", ("AZURE_STORAGE_",)
    access = "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"

    def connect(self) -> Any:
        from adlfs import AzureBlobFileSystem

        return AzureBlobFileSystem(skip_instance_cache=True)

    async def _ask(self, key: Key, operation: str, *args: Any, version: str | None = None, **more: Any) -> Any:
        """Ask for a blob, on the condition that it has this version."""
        if version:
            from azure.core import MatchConditions

            more |= {"etag": f'"{version}"', "match_condition": MatchConditions.IfNotModified}
        blob = key.store.service_client.get_blob_client(key.bucket, key.name)
        return await getattr(blob, operation)(*args, **more, **_IN_TIME)

    async def _list(self, key: Key, prefix: str) -> dict[str, Stat]:
        container, found = key.store.service_client.get_container_client(key.bucket), {}
        async for one in container.list_blobs(name_starts_with=prefix, include=["metadata"], **_IN_TIME):
            if not _is_folder(one.metadata):
                found[one.name] = Stat(one.size, one.etag.strip('"'))
        return found

    async def _stat(self, key: Key) -> Stat:
        found = await self._ask(key, "get_blob_properties")
        if _is_folder(found.metadata):
            raise FileNotFoundError(key.name)
        return Stat(found.size, found.etag.strip('"'))

    async def _read(self, key: Key, start: int, stop: int | None, version: str | None) -> bytes:
        length = None if stop is None else stop - start
        answer = await self._ask(key, "download_blob", start, length, max_concurrency=1, version=version)
        return bytes(await answer.readall())

    async def _put(self, key: Key, file: BinaryIO, version: str | None) -> str:
        is_any = version != ABSENT
        found = await self._ask(key, "upload_blob", file, overwrite=is_any, max_concurrency=8, version=version)
        return str(found["etag"]).strip('"')

    async def _delete(self, key: Key, version: str | None) -> None:
        await self._ask(key, "delete_blob", version=version)


def _is_folder(metadata: dict[str, str] | None) -> bool:
    """Return whether a blob is how accounts with folders list one; the case is that of a header."""
    return "hdi_isfolder" in map(str.lower, metadata or ())
