"""A reader while checkpoints rotate; two writers in one directory; a process that saves and restores on and on."""

import functools
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator

from tests.reliability import forks
from tests.reliability.judge import quiet, text_of
from tests.reliability.tally import Extent, Tally
from tests.reliability.workloads import Save, System

_SECONDS = 600
_SAVES = 2_000
_PAUSE = 0.02  # between saves: without one, a reader may be overtaken ten times, which is an error that says so
_SLACK = 8 << 20  # bytes that a process may grow by over all saves; real leaks are of the size of the tree


def reader(system: System, tally: Tally, extent: Extent) -> None:
    """Restore the latest checkpoint again and again while another process saves with ``keep=2``."""
    _watch(system, tally, extent, _rotate)


def overwrites(system: System, tally: Tally, extent: Extent) -> None:
    """Restore the latest of two steps again and again while another process overwrites it: never the older step."""
    _watch(system, tally, extent, _overwrite)


def writers(system: System, tally: Tally, extent: Extent) -> None:
    """The same while two processes save the same steps with ``overwrite=True``, as scripts do by mistake."""
    both = [functools.partial(_rotate, overwrite=True, mine=mine) for mine in (0, 1_000_000)]
    _watch(system, tally, extent, *both)


def _rotate(system: System, notes: str, folder: str, *, overwrite: bool = False, mine: int = 0) -> None:
    system.use()
    for step in range(1, 1_000_000):
        _save(Save(step, 2, overwrite), system, notes, folder, mine + step)
        time.sleep(_PAUSE * (2 if mine else 1))  # the steps of two writers drift apart


def _overwrite(system: System, notes: str, folder: str) -> None:
    system.use()
    for number in range(1, 1_000_000):
        _save(Save(min(number, 2), overwrite=number > 2), system, notes, folder, number)


def _save(save: Save, system: System, notes: str, folder: str, number: int) -> None:
    try:
        save.run(system, folder, number)
    except Exception as error:
        with open(f"{notes}/failures", "a", encoding="utf-8") as file:
            file.write(f"blocked: the save: {text_of(error)}\n")


def _watch(system: System, tally: Tally, extent: Extent, *writers: Callable[[System, str, str], None]) -> None:
    """Restore beside writers; where there is one, never what is older than what was restored before."""
    seconds, is_ordered = max(0.5, _SECONDS * extent.scale), len(writers) == 1
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        run = f"{folder}/run"
        with forks.running(*(functools.partial(writer, system, folder, run) for writer in writers)):
            seen = forks.run(lambda: _reads(system, run, seconds, is_ordered=is_ordered), timeout=seconds + 120)
        for outcome, times in (seen.value or {f"crash: {seen}": 1}).items():
            tally.add(outcome, "a restore", times)
        if os.path.exists(f"{folder}/failures"):
            with open(f"{folder}/failures", encoding="utf-8") as file:
                for line in file:
                    tally.add(line.strip(), "the writer")


def _reads(system: System, folder: str, seconds: float, *, is_ordered: bool) -> Counter[str]:
    system.use()
    outcomes, last = Counter[str](), 0
    while not system.module.latest_checkpoint(folder):
        time.sleep(0.01)
    end = time.monotonic() + seconds
    with quiet():
        while time.monotonic() < end:
            try:
                restored = system.restore(folder)
            except Exception as error:
                outcomes[f"unreadable: {text_of(error)}"] += 1
                continue
            found = None if restored is None else system.number_of(restored)
            if found is None:
                outcomes["nothing: restored None" if restored is None else "half: never saved"] += 1
            else:
                outcomes["" if found >= last or not is_ordered else f"lost: {found} after {last}"] += 1
                last = found
    return outcomes


def soak(system: System, tally: Tally, extent: Extent) -> None:
    """Save and restore in one process; memory, descriptors and threads stay as they are after the first tenth."""
    count = extent.times(_SAVES, 40)
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        ended = forks.run(lambda: list(_soaked(system, folder, count)), timeout=7_200)
    for outcome in ended.value or [f"crash: {ended}"]:
        tally.add(outcome, f"{count} saves and restores")


def _soaked(system: System, folder: str, count: int) -> Iterator[str]:
    system.use()
    first: dict[str, int] = {}
    for step in range(1, count + 1):
        with quiet():
            Save(step, 2, background=step % 2 == 0).run(system, f"{folder}/run", 1 + step % 7)
            found = system.number_of(system.restore(f"{folder}/run"))
        if step == max(10, count // 10):
            first = _held()
        yield "" if found == 1 + step % 7 else f"lost: step {step} holds {found}"
    last = _held()
    limits = {"memory": _SLACK, "descriptors": 0, "threads": 4}
    grown = {name: last[name] - first[name] for name in last if last[name] > first[name] + limits[name]}
    print(f"  {system.name}: after {max(10, count // 10)} saves {first}, after {count} {last}", flush=True)
    if grown:
        yield f"leak: {grown} over {count} saves and restores"


def _held() -> dict[str, int]:
    with open("/proc/self/statm", encoding="ascii") as file:
        memory = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "memory": memory,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
