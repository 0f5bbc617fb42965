"""Keep the descriptors 0, 1 and 2 from becoming those of a checkpoint's files.

Where a program runs with a closed stderr (``2>&-``, some daemons), the next file that is opened gets the descriptor 2,
and what native libraries log is written into it.
"""

from __future__ import annotations

import os
from contextlib import suppress

_STANDARD = (0, 1, 2)


def occupy() -> None:
    """Open the null device for those that are closed."""
    for descriptor in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            with suppress(OSError):  # there may be no null device, as in a changed root
                opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
                if opened not in _STANDARD:  # another thread was faster
                    os.close(opened)
