"""Checksums of the arrays of several processes, where TensorStore itself verifies them or does not look.

A chunk is a Zstandard frame. One with a content checksum (RFC 8878, 3.1.1: bit 2 of the byte after the magic number,
and the last four bytes of the frame, of XXH64) is verified by whoever decodes it, real Flax included. The metadata
has a member of its own, which TensorStore ignores. Both are in every copy of the files, on disks and in stores.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

_MEMBER, _CRC32 = "flax_ckpt_compat", "crc32"
LEVEL = 1  # of jax's spec
_MAGIC, _CHECKSUM_FLAG = bytes.fromhex("28b52ffd"), 1 << 2
# What TensorStore says of a frame with another content.
_DIFFERS = "doesn't match checksum"


def is_summed(chunk: bytes) -> bool:
    """Return whether a chunk, of which these are the first bytes, has a content checksum."""
    return chunk.startswith(_MAGIC) and bool(chunk[len(_MAGIC)] & _CHECKSUM_FLAG)


def is_of_content(error: Exception) -> bool:
    """Return whether an error of TensorStore says that the content of a chunk is not what was saved."""
    return _DIFFERS in str(error)


def with_sum(metadata: bytes) -> bytes:
    """Add a checksum of all other members to a ``.zarray``."""
    fields = json.loads(metadata)
    return json.dumps({**fields, _MEMBER: {_CRC32: _sum(fields)}}).encode()


def holds(fields: Mapping[str, Any]) -> bool | None:
    """Return whether the members of a ``.zarray`` are those that were saved; None if it has no checksum."""
    if _MEMBER in fields:
        return bool(fields[_MEMBER] == {_CRC32: _sum(fields)})
    # The name of the member may itself be damaged.
    return False if any(isinstance(value, dict) and _CRC32 in value for value in fields.values()) else None


def _sum(fields: Mapping[str, Any]) -> int:
    others = {name: value for name, value in fields.items() if name != _MEMBER}
    return zlib.crc32(json.dumps(others, sort_keys=True).encode())
