"""Telling whether a process, of which only the id in a file's name is left, still lives."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from contextlib import suppress


@functools.cache
def machine() -> str:
    """A name for the set of processes whose pids we can look up: this boot, host and pid namespace."""
    parts = [platform.node()]
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def start_time(pid: int) -> int:
    """When a process started, in the kernel's ticks; 0 where that is unknown but it lives, -1 where it does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in parentheses may hold blanks, so the fields are counted from after it.
            fields = file.read().rpartition(b")")[2].split()
        # A zombie writes no more, even if its parent never asks how it ended.
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
