"""Looking ahead in a few bytes: how far they suffice to find the next array of a msgpack file."""

from __future__ import annotations

from . import markers

_EXT_HEADERS = {0xC7: 3, 0xC8: 4, 0xC9: 6}  # tag, length, code
_INTS = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
_BINS = {0xC4: 2, 0xC5: 3, 0xC6: 5}
# What Flax writes for an array: a msgpack array of shape, dtype name and bytes.
_THREE = 0x93


def last_key(data: bytes) -> int:
    """Where the key of the next array starts, if all up to the array's data is in these bytes; else -1.

    Args:
        data: starts at a key of a map. Keys of subtrees may lie before that of the array.
    """
    at = 0
    try:
        while True:
            key = at
            at = _after_short_text(data, at)
            if at > 0 and 0x81 <= data[at] <= 0x8F:  # a short map: its first key follows
                at += 1
            else:
                return key if at > 0 and 0 < _after_array_header(data, at) <= len(data) else -1
    except IndexError:
        return -1


def _after_short_text(data: bytes, at: int) -> int:
    return at + 1 + (data[at] & 0x1F) if at >= 0 and 0xA0 <= data[at] <= 0xBF else -1


def _after_array_header(data: bytes, at: int) -> int:
    """Where the array's data starts, or -1 where there is no array of Flax's."""
    width = _EXT_HEADERS.get(data[at])
    if width is None or data[at + width - 1] != markers.EXT_ARRAY or data[at + width] != _THREE:
        return -1
    at += width + 1
    if not 0x90 <= data[at] <= 0x9F:
        return -1
    axes = data[at] & 0x0F
    at += 1
    for _ in range(axes):
        at += 1 if data[at] < 0x80 else _INTS[data[at]] if data[at] in _INTS else len(data) + 1
    at = _after_short_text(data, at)
    return at + _BINS[data[at]] if at > 0 and data[at] in _BINS else -1
