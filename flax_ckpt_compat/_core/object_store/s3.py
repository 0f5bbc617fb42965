"""Reach ``s3://``, Amazon's S3 and servers with its API, by the client of s3fs."""

from __future__ import annotations

import asyncio
import datetime
import os
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any, BinaryIO

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store.client import (
    ABSENT,
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    EXPIRES_AFTER,
    PART_BYTES,
    FsspecClient,
    Key,
    byte_range,
    split,
)
from flax_ckpt_compat._core.progress import Meter
from flax_ckpt_compat._core.storage import Stat
from flax_ckpt_compat._core.thread_pools import in_parallel

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ANY_REGION = "us-east-1"  # servers of others have no regions, but requests are signed with one
_TRIES, _AT_ONCE = 8, 64
_MOST_PARTS = 10_000


class S3Client(FsspecClient):
    """The scheme ``s3``."""

    package, extra, variables = "s3fs", "s3", ("AWS_",)
    credentials = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    endpoint = "AWS_REGION and AWS_ENDPOINT_URL"

    def connect(self) -> Any:
        import botocore.session
        import s3fs
        from aiobotocore.session import AioSession

        session = AioSession()
        # Lists have a time for each object, which takes longer to parse than all else of them.
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
        region = next(filter(None, map(os.environ.get, _REGIONS)), None)
        is_elsewhere = any(map(os.environ.get, _ENDPOINTS))
        return s3fs.S3FileSystem(
            session=session,
            anon=botocore.session.get_session().get_credentials() is None,
            client_kwargs={"region_name": region or (_ANY_REGION if is_elsewhere else None)},
            config_kwargs={
                "retries": {"mode": "standard", "total_max_attempts": _TRIES},
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": ANSWER_SECONDS,
                "max_pool_connections": _AT_ONCE,
            },
            cache_regions=not (region or is_elsewhere),
            skip_instance_cache=True,
        )

    async def _ask(self, key: Key, operation: str, **arguments: Any) -> Any:
        """Ask aiobotocore's client, in the region of the bucket."""
        await key.store.set_session()
        s3 = await key.store.get_s3(key.bucket)
        return await getattr(s3, operation)(Bucket=key.bucket, **arguments)

    async def _list(self, key: Key, prefix: str) -> dict[str, Stat]:
        found, more = dict[str, Stat](), dict[str, str]()
        while True:
            page = await self._ask(key, "list_objects_v2", Prefix=prefix, **more)
            found |= {one["Key"]: Stat(one["Size"], one["ETag"]) for one in page.get("Contents", ())}
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _stat(self, key: Key) -> Stat:
        found = await self._ask(key, "head_object", Key=key.name)
        return Stat(found["ContentLength"], found["ETag"])

    async def _read(self, key: Key, start: int, stop: int | None, version: str | None) -> tuple[bytes, Stat | None]:
        asked = _condition(version)
        if start or stop is not None:
            asked["Range"] = byte_range(start, stop)
        for left in reversed(range(_TRIES)):
            try:
                answer = await self._ask(key, "get_object", Key=key.name, **asked)
                async with answer["Body"] as body:
                    data = bytes(await body.read())
                size = answer.get("ContentRange", "").rpartition("/")[2] or len(data)
                return data, Stat(int(size), answer["ETag"])
            except Exception as error:
                # The client itself tries again, but not once an answer has begun.
                if hasattr(error, "response") or not left:
                    raise
            await asyncio.sleep(0.1)
        raise AssertionError

    async def _put(self, key: Key, file: BinaryIO, version: str | None) -> str:
        found = await self._ask(key, "put_object", Key=key.name, Body=file.read(), **_condition(version))
        return str(found["ETag"])

    def write(self, url: str, file: BinaryIO, version: str | None, meter: Meter) -> str:
        """Write an object, a large one in parts: it appears with the last request."""
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
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
            parts = {"Parts": in_parallel(send, range(-(-size // part_bytes)), _AT_ONCE)}
            whole = {"UploadId": begun, "MultipartUpload": parts}
            return str(self._send(url, "complete_multipart_upload", **whole, **_condition(version))["ETag"])
        except BaseException:
            with suppress(StorageError, FileNotFoundError):
                self._send(url, "abort_multipart_upload", UploadId=begun)
            raise

    def _send(self, url: str, operation: str, **arguments: Any) -> Any:
        return self._run(url, "written", self._ask, operation, Key=split(url)[2], **arguments)

    async def _delete(self, key: Key, version: str | None) -> None:
        await self._ask(key, "delete_object", Key=key.name, **_condition(version))

    def stale_parts(self, url: str, abort: Collection[str] = ()) -> Collection[str]:
        found, prefix = [], split(f"{url}/")[2]
        answer = self._run(url, "listed", self._ask, "list_multipart_uploads", Prefix=prefix)
        for one in answer.get("Uploads", ()):
            if time.time() - datetime.datetime.fromisoformat(one["Initiated"]).timestamp() > EXPIRES_AFTER:
                found.append(one["Key"][len(prefix) :])
                if found[-1] in abort:
                    self._send(f"{url}/{found[-1]}", "abort_multipart_upload", UploadId=one["UploadId"])
        return found


def _condition(version: str | None) -> dict[str, str]:
    if version is None:
        return {}
    return {"IfNoneMatch": "*"} if version == ABSENT else {"IfMatch": version}
