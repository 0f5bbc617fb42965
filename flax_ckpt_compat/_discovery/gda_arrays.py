"""Tell what the arrays beside a msgpack file lack: those of several processes, in Flax's folder ``…_gda``."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress

from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.local.presence import stays_inside
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import foreign
from flax_ckpt_compat._discovery.orbax_directory import names_in

_PLACEHOLDER = steps.ARRAYS_PLACEHOLDER.encode()
# A text of msgpack that begins with the placeholder, before a folder's name: its length, in the tag or behind it.
_REFERENCE = re.compile(rb"(?:([\xb1-\xbf])|\xd9(.)|\xda(..)|\xdb(....))" + re.escape(_PLACEHOLDER), re.DOTALL)
_MAX_BYTES = 2**20  # bytes to look at; larger files are left to the reader


def missing_array(file: Location, head: bytes) -> str | None:
    """Return what the arrays beside a msgpack file lack, in words; ``head`` are its first bytes."""
    folder = file.sibling(steps.ARRAYS_POSTFIX)
    is_all = len(head) < foreign.FIRST_BYTES and not file.is_remote
    if _PLACEHOLDER not in head and (is_all or not folder.isdir()):
        return None
    content = file.read(0, _MAX_BYTES)
    for match in _REFERENCE.finditer(content):
        length = int.from_bytes(match[match.lastindex or 0], "big") - (0xA0 if match.lastindex == 1 else 0)
        name = content[match.end() : match.end() + length - len(_PLACEHOLDER)].decode(errors="replace")
        if stays_inside(name) and (lost := _missing_in_array(folder / name)):
            return f"{folder.name}/{name}/{lost} is missing"
    return None


def _missing_in_array(folder: Location) -> str | None:
    """Return the name of a file that a zarr array of Flax lacks; it stores every chunk."""
    names = names_in(folder)
    if layout.ZARR2_METADATA not in names:
        return layout.ZARR2_METADATA
    with suppress(ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError):  # which the reader tells
        fields = json.loads((folder / layout.ZARR2_METADATA).read(0, _MAX_BYTES))
        counts = [-(-side // chunk) for side, chunk in zip(fields["shape"], fields["chunks"], strict=True)]
        chunks = [name for name in names if layout.ZARR2_CHUNK.fullmatch(name)]
        if len(chunks) < math.prod(counts):
            return f"(one of {math.prod(counts)} chunks)"
    return None
