"""Identify processes by host, pid and start time, to tell whether a file's writer is alive."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from contextlib import suppress


@functools.cache
def machine() -> str:
    """Return an id of this host, boot and pid namespace, within which pids can be looked up."""
    parts = [platform.node()]
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def start_time(pid: int) -> int:
    """Return the start time of a process in kernel ticks; 0 if it lives but that is unknown, -1 if it is dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in parentheses may contain blanks, so split behind it.
            fields = file.read().rpartition(b")")[2].split()
        # A zombie never writes again, even if its parent never reaps it.
        return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        pass
    if sys.platform.startswith("linux") and os.path.isdir("/proc/self"):
        return -1
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except OSError:
        pass
    return 0
