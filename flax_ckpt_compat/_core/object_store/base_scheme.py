"""Define the base class of the schemes of object stores, `s3` and `gs`."""

from __future__ import annotations

from typing import Any

from flax_ckpt_compat._core.object_store import retrying
from flax_ckpt_compat._core.progress import Meter


class StoreScheme:
    """One scheme of URLs."""

    tells_sizes: bool  # an error for a range beyond the end of an object has its size
    needs_commit_file: bool  # a directory without ``commit_success.txt`` is incomplete

    def bucket_spec(self, bucket: str) -> dict[str, Any]:
        """Return TensorStore's spec of a bucket."""
        raise NotImplementedError

    def open(self, bucket: str, context: Any = None) -> Any:
        """Open a bucket as a TensorStore ``KvStore``, in the context of all requests or in this one."""
        return retrying.open_bucket(tuple(self.bucket_spec(bucket).items()), context or retrying.context())

    def list_keys(self, url: str, start: bytes, stop: bytes) -> list[bytes]:
        """List all keys of the URL's bucket from ``start`` up to ``stop``; b"" stands for the end of the bucket."""
        return self.list_once(url, start, stop)

    def stored_crc32c(self, url: str) -> int | None:  # noqa: ARG002  (stores that report none inherit it)
        """Return the CRC-32C of an object that the store reports, or None."""
        return None

    def stored_size(self, url: str) -> int | None:  # noqa: ARG002  (see `tells_sizes`)
        """Return the size of an object that the store reports in a request of its own, or None."""
        return None

    def deletes_versions(self) -> bool:
        """Return whether a deletion can be restricted to one version of an object."""
        return True

    def delete_version(self, url: str, version: bytes) -> bool:
        """Delete an object if it has this version; return whether it had."""
        _, bucket, key = retrying.split(url)
        stamp = retrying.retry(url, "deleted", lambda: self.open(bucket).write(key, None, if_equal=version))
        return bool(stamp.generation)

    def write_in_parts(self, url: str, content: Any, version: bytes, meter: Meter) -> bool | None:  # noqa: ARG002
        """Write a large object by several connections if it has this version; ``meter`` counts the bytes.

        Return False if it has another one, and None, having written nothing, where that is not possible."""
        return None

    def unfinished_uploads(self, url: str) -> dict[str, float]:  # noqa: ARG002  (stores without parts have none)
        """Return names in a folder to which parts were sent and are not an object yet → when the first upload began."""
        return {}

    def abort_uploads(self, url: str, before: float) -> None:
        """Delete the parts of all unfinished uploads of an object that began before a time."""

    def list_once(self, url: str, start: bytes, stop: bytes) -> list[bytes]:
        """List keys by TensorStore; see `list_keys`."""
        import tensorstore as ts

        key_range, bucket = ts.KvStore.KeyRange(start, stop), retrying.split(url)[1]
        names: list[bytes] = retrying.retry(url, "listed", lambda: self.open(bucket).list(key_range))
        return names
