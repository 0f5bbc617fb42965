"""Read one version of an object in parts."""

from __future__ import annotations

import errno
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import client
from flax_ckpt_compat._core.storage import HEAD_BYTES, OpenedFile
from flax_ckpt_compat._core.storage_errors import OutOfRangeError


class OpenedObject(OpenedFile):
    """One version of an object, of ``size`` bytes, read in parts; ``head`` has its first bytes, or all of a small one.

    Size and version are of one moment: a small object is one answer, and of a large one the size is looked up later
    than the first bytes, and earlier than the last.
    """

    def __init__(self, url: str):
        self.url = url
        self.head, self.size = b"", 0
        try:
            found, is_whole = client.request_object(url, slice(0, HEAD_BYTES)), False
        except OutOfRangeError as error:
            if error.size <= 0:
                return  # empty
            found, is_whole = client.request_object(url, None), True  # one answer, even if it was just replaced
            if found is not None and len(found.value) < error.size and client.size(url) > len(found.value):
                raise client.too_short(url) from error
        self._version = self._version_of(found)
        self.head = bytes(found.value)
        self.size = len(self.head) if is_whole else client.size(url)

    def _version_of(self, result: Any) -> bytes:
        if result is None or result.state == "missing":
            raise client.not_found_error(self.url)
        return bytes(result.stamp.generation)

    def read(self, start: int, stop: int) -> bytes:
        """Read from ``start`` to ``stop`` or the end; raise StorageError if the object was replaced or removed."""
        stop = min(stop, self.size)
        if stop <= start:
            return b""
        try:
            result = client.request_object(self.url, slice(start, stop))
        except OutOfRangeError:
            result = None
        if result is None or result.state == "missing" or self._version_of(result) != self._version:
            message = f"{self.url} was replaced or removed since it was opened; open it again"
            raise StorageError(message, path=self.url, errno=errno.ESTALE)
        return bytes(result.value)
