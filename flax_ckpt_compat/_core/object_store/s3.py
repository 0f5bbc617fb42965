"""Reach ``s3://``, Amazon's S3 and servers with its API, by the client of s3fs."""

from __future__ import annotations

import asyncio
import datetime
import os
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store.client import (
    ABSENT,
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    EXPIRES_AFTER,
    PART_BYTES,
    ConflictError,
    FsspecClient,
    byte_range,
    gone,
    split,
)
from flax_ckpt_compat._core.progress import OFF, Meter
from flax_ckpt_compat._core.storage import Stat
from flax_ckpt_compat._core.thread_pools import in_parallel

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_PROFILES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_FILES = ("AWS_SESSION_TOKEN", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")
_ANY_REGION = "us-east-1"  # servers of others have no regions, but requests are signed with one
_TRIES, _AT_ONCE = 8, 64
_MOST_PARTS = 10_000


class S3Client(FsspecClient):
    """The scheme ``s3``."""

    package, extra, needs_commit_file = "s3fs", "s3", False
    variables = _ENDPOINTS + _REGIONS + _KEYS + _PROFILES + _FILES

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

    async def _s3(self, store: Any, bucket: str) -> Any:
        """Return aiobotocore's client, in the region of a bucket."""
        await store.set_session()
        return await store.get_s3(bucket)

    async def _list(self, store: Any, bucket: str, prefix: str) -> dict[str, Stat]:
        s3, found, more = await self._s3(store, bucket), dict[str, Stat](), dict[str, str]()
        while True:
            page = await s3.list_objects_v2(Bucket=bucket, Prefix=prefix, **more)
            found |= {one["Key"]: Stat(one["Size"], one["ETag"]) for one in page.get("Contents", ())}
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def _stat(self, store: Any, bucket: str, key: str) -> Stat:
        found = await (await self._s3(store, bucket)).head_object(Bucket=bucket, Key=key)
        return Stat(found["ContentLength"], found["ETag"])

    async def _read(
        self, store: Any, bucket: str, key: str, start: int, stop: int | None, version: str | None
    ) -> tuple[bytes, Stat | None]:
        s3, asked = await self._s3(store, bucket), {"Bucket": bucket, "Key": key}
        if start or stop is not None:
            asked["Range"] = byte_range(start, stop)
        if version:
            asked["IfMatch"] = version
        for left in reversed(range(_TRIES)):
            try:
                answer = await s3.get_object(**asked)
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

    async def _put(self, store: Any, bucket: str, key: str, data: bytes, version: str | None) -> str:
        s3 = await self._s3(store, bucket)
        return str((await s3.put_object(Bucket=bucket, Key=key, Body=data, **_condition(version)))["ETag"])

    def put_file(self, url: str, path: str, version: str | None = None, meter: Meter = OFF) -> str:
        """Write an object from a local file; of a large one in parts, and it appears with the last request."""
        size = os.path.getsize(path)
        if size <= PART_BYTES:
            return super().put_file(url, path, version, meter)
        part_bytes = max(PART_BYTES, -(-size // _MOST_PARTS))
        begun = self._send(url, "create_multipart_upload")["UploadId"]

        def send(number: int) -> dict[str, Any]:
            with open(path, "rb") as file:
                file.seek(number * part_bytes)
                data = file.read(part_bytes)
            etag = self._send(url, "upload_part", UploadId=begun, PartNumber=number + 1, Body=data)["ETag"]
            meter.add(len(data), url)
            return {"PartNumber": number + 1, "ETag": etag}

        try:
            parts = in_parallel(send, range(-(-size // part_bytes)), _AT_ONCE)
            whole = {"UploadId": begun, "MultipartUpload": {"Parts": parts}}
            return str(self._send(url, "complete_multipart_upload", **whole, **_condition(version))["ETag"])
        except BaseException as error:
            if isinstance(error, (ConflictError, FileNotFoundError)):
                with open(path, "rb") as file, suppress(StorageError, FileNotFoundError):
                    if (found := self._version_if_written(url, file)) is not None:
                        return found
            with suppress(StorageError, FileNotFoundError):
                self._send(url, "abort_multipart_upload", UploadId=begun)
            if version and isinstance(error, FileNotFoundError):
                raise gone(url) from error
            raise

    def _send(self, url: str, operation: str, **arguments: Any) -> Any:
        async def request(store: Any, bucket: str, key: str) -> Any:
            s3 = await self._s3(store, bucket)
            return await getattr(s3, operation)(Bucket=bucket, Key=key, **arguments)

        return self._run(url, "written", request)

    async def _delete(self, store: Any, bucket: str, key: str, version: str | None) -> None:
        s3 = await self._s3(store, bucket)
        await s3.delete_object(Bucket=bucket, Key=key, **({"IfMatch": version} if version else {}))

    def stale_parts(self, url: str, abort: Collection[str] = ()) -> Collection[str]:
        async def request(store: Any, bucket: str, key: str) -> Any:
            s3 = await self._s3(store, bucket)
            return await s3.list_multipart_uploads(Bucket=bucket, Prefix=f"{key}/" if key else "")

        found, start = [], len(split(url)[2] + "/") if split(url)[2] else 0
        for one in self._run(url, "listed", request).get("Uploads", ()):
            if time.time() - datetime.datetime.fromisoformat(one["Initiated"]).timestamp() > EXPIRES_AFTER:
                found.append(one["Key"][start:])
                if found[-1] in abort:
                    self._send(f"{url}/{found[-1]}", "abort_multipart_upload", UploadId=one["UploadId"])
        return found


def _condition(version: str | None) -> dict[str, str]:
    if version is None:
        return {}
    return {"IfNoneMatch": "*"} if version == ABSENT else {"IfMatch": version}
