"""Define the index of a checkpoint: its keys and where their values are stored."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from flax_ckpt_compat._core.errors import CorruptCheckpointError


@dataclasses.dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes in a file of the checkpoint.

    Attributes:
        file: relative to the checkpoint's directory.
        offset, length: in bytes.
    """

    file: str
    offset: int
    length: int


class OpaqueValue:
    """A value that only TensorStore can locate."""


StoredValue = bytes | ByteRange | OpaqueValue


class Index(Protocol):
    """The values of a checkpoint by key."""

    def find(self, key: str) -> StoredValue | None:
        """Return the value, its byte range, or None if the key is absent."""
        ...

    def get(self, key: str) -> bytes | None:
        """Read a small value; return None if the key is absent."""
        ...

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """Return TensorStore's spec of the keys below ``prefix``."""
        ...


def stays_inside(relative: str) -> bool:
    """Return whether a relative path stays below its directory."""
    return not (relative.startswith("/") or "\0" in relative or ".." in relative.split("/"))


def refuse_escape(relative: str, path: str) -> None:
    """Raise if a relative path leads outside the checkpoint's directory."""
    if not stays_inside(relative):
        raise CorruptCheckpointError(
            f"{path}: it refers to {relative!r}, which lies outside its directory; it was tampered with: do not use it",
            path=path,
        )
