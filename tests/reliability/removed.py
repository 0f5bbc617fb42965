"""What is left of saves beside a program that removes temporaries, and of containers that are killed time and again."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import tempfile
import time

from tests.reliability import forks
from tests.reliability.extent import Extent
from tests.reliability.judge import quiet
from tests.reliability.tally import Tally
from tests.reliability.workloads import Save, System

_SAVES, _LOOPS, _STARTS = 2_000, 50, 6
_NEW_MOUNTS, _NEW_HOST_NAME, _NEW_PIDS, _PRIVATE = 0x00020000, 0x04000000, 0x20000000, 0x44000
_PAUSE = 0.02  # between removals, at most


def crash_loops(system: System, tally: Tally, extent: Extent) -> None:
    """Kill a program that saves, in a container that starts again with another host name and other process numbers.

    After each start at most one unfinished save is left; a last start, which is not killed, leaves none."""
    for number in range(extent.times(_LOOPS, 2)):
        chance = random.Random(f"{system.name} {number}")
        with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
            worst = 0
            for start in range(_STARTS):
                delay = 0.02 + chance.random() * (0.3 if system.is_ours else 0.8)
                ended = forks.run(lambda start=start, delay=delay: _contain(system, folder, start, delay), timeout=120)
                if ended.value is None:
                    tally.add(f"crash: {ended}", f"loop {number}")
                    return
                worst = max(worst, len(_unfinished(folder)))
            forks.run(lambda: _contain(system, folder, _STARTS, None), timeout=120)
            left = len(_unfinished(folder))
        tally.add("" if worst <= 1 and not left else f"leftovers: {worst}, at the end {left}", f"loop {number}")


def _unfinished(folder: str) -> list[str]:
    """Return what is left of saves and takes space: a program that is killed as it begins leaves an empty file."""
    run = f"{folder}/run"
    names = [name for name in os.listdir(run) if "tmp" in name] if os.path.isdir(run) else []
    return [name for name in names if os.path.getsize(f"{run}/{name}")]


def _contain(system: System, folder: str, start: int, delay: float | None) -> int:
    """Run a program in new namespaces; kill it after a delay, or let it save once."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_HOST_NAME | _NEW_PIDS):
        raise OSError(ctypes.get_errno(), "new namespaces are not allowed here")
    child = os.fork()
    if not child:
        libc.mount(b"none", b"/", None, _PRIVATE, None)
        libc.mount(b"proc", b"/proc", b"proc", 0, None)
        libc.sethostname(b"pod-%d" % start, 5 + len(str(start)))
        system.use()
        with quiet():
            for step in range(1_000 * start + 1, 1_000 * (start + 1)):
                Save(step, 2).run(system, f"{folder}/run", step)
                if delay is None:
                    break
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return child
