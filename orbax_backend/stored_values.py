"""Places of the values of a checkpoint's keys, and the question for them."""

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
    """A value that is there, but of which only TensorStore knows where."""


StoredValue = bytes | ByteRange | OpaqueValue


class Index(Protocol):
    """The values of a checkpoint by key."""

    def find(self, key: str) -> StoredValue | None:
        """The value itself, where it lies, or None if the key is absent."""
        ...

    def get(self, key: str) -> bytes | None:
        """A small value, or None if the key is absent."""
        ...

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """The spec through which TensorStore reads the keys that start with ``prefix``."""
        ...


def stays_inside(relative: str) -> bool:
    """Whether a relative path is_primary to something below the directory it is relative to."""
    return not (relative.startswith("/") or "\0" in relative or ".." in relative.split("/"))


def refuse_escape(relative: str, path: str) -> None:
    """Nothing outside the checkpoint's directory is ever read, whatever the checkpoint says."""
    if not stays_inside(relative):
        raise CorruptCheckpointError(
            f"{path}: it refers to {relative!r}, which lies outside its directory; it was tampered with: do not use it",
            path=path,
        )
