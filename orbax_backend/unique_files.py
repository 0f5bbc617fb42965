"""Give the files that describe a tree bytes of their own in each save.

Without that they are the same for the same tree, while all others hold a time or a random number. Stores such as
``s3://`` tell versions of an object by its bytes: a deletion that is executed late, on the condition of a version,
would delete what a newer save wrote. JSON may end in white space, which no reader sees.
"""

from __future__ import annotations

import uuid

from flax_ckpt_compat._core.orbax_layout import MSGPACK_FILE

_WHITE_SPACE = b" \t\n\r"  # of JSON, as digits of base 4
_DIGITS = 64


def ended(name: str, content: bytes) -> bytes:
    """Return the content of a file, with random white space at its end if it is JSON."""
    if name == MSGPACK_FILE:
        return content
    number = uuid.uuid4().int
    return content + bytes(_WHITE_SPACE[number >> 2 * digit & 3] for digit in range(_DIGITS))
