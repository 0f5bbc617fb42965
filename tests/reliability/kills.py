"""Kill a save, or let one of its calls fail, at every call that changes the file system and at random times."""

import errno
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from flax_ckpt_compat.errors import CheckpointError
from tests.reliability import forks, shim
from tests.reliability.judge import judge, leftovers
from tests.reliability.shim import Action
from tests.reliability.tally import Extent, Tally
from tests.reliability.workloads import SCENARIOS, Save, Scenario, System

INJECTIONS = {
    "killed": (Action.KILL, 0),
    "killed in the middle of a write": (Action.KILL_HALF, 0),
    "EIO": (Action.FAIL, errno.EIO),
    "ENOSPC": (Action.FAIL, errno.ENOSPC),
    "a disk that stays full": (Action.FULL, errno.ENOSPC),
}


@contextmanager
def _base(system: System, scenario: Scenario) -> Iterator[str]:
    """A directory with all saves of a scenario but the last in its ``run``."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        if scenario.saves[1:]:
            save_all(system, f"{folder}/run", scenario.saves[:-1])
        yield folder


def save_all(system: System, folder: str, saves: Sequence[Save]) -> None:
    """Save in a fork, one after the other, the values 1, 2 and so on."""

    def work() -> None:
        system.use()
        for number, save in enumerate(saves, 1):
            save.run(system, folder, number)

    saved = forks.run(work)
    assert not saved.error and not saved.code, saved


def _hit(system: System, scenario: Scenario, folder: str, at: int, action: Action, error: int) -> tuple[int, str]:
    """Run the last save; return the number of calls and what it raised."""
    system.use()
    save, number, raised = scenario.saves[-1], len(scenario.saves), ""
    # Of a background save that could not remove old steps, this is all that is told.
    with mock.patch.object(logging.getLogger("flax_ckpt_compat"), "error") as logged:
        shim.arm(folder, at, action, error)
        try:
            save.run(system, f"{folder}/run", number)
        except Exception as reason:
            kind = "" if isinstance(reason, CheckpointError) or not system.is_ours else "raw: "
            raised = f"{kind}{type(reason).__name__}: {reason}"
        return shim.disarm(), raised or "".join(map(str, logged.call_args_list))


def at_calls(system: System, tally: Tally, extent: Extent, names: Sequence[str]) -> None:
    """Hit each call of each scenario's last save, or as many as the extent says, in a fresh copy of the directory."""
    for scenario in extent.of(SCENARIOS):
        with _base(system, scenario) as base:
            calls = _count_calls(system, scenario, base)
            for name, at in extent.some([(name, at) for name in names for at in range(1, calls + 1)], scenario.name):
                wrong = _case(system, scenario, base, name, at)
                tally.add(wrong, f"{scenario.name}, {name} at call {at} of {calls}")


def _case(system: System, scenario: Scenario, base: str, name: str, at: int) -> str:
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        copy(base, folder)
        hit = forks.run(lambda: _hit(system, scenario, folder, at, *INJECTIONS[name]))
        acknowledged = hit.value is not None and not hit.value[1]
        wrong = "hung: the save" if hit.hung else hit.error
        wrong = hit.value[1] if hit.value and hit.value[1].startswith("raw: ") else wrong
        return wrong or judged(system, f"{folder}/run", scenario.states()[-2:], acknowledged=acknowledged)


def _count_calls(system: System, scenario: Scenario, base: str) -> int:
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        copy(base, folder)
        ended = forks.run(lambda: _hit(system, scenario, folder, 0, Action.PASS, 0))
    assert ended.value and ended.value[1] == "", ended
    return int(ended.value[0])


def copy(base: str, folder: str) -> None:
    """Copy the checkpoints of a base."""
    if os.path.isdir(f"{base}/run"):
        shutil.copytree(f"{base}/run", f"{folder}/run", symlinks=True)


def judged(system: System, folder: str, states: list[dict[int, int]], *, acknowledged: bool, tidy: bool = True) -> str:
    """Judge a directory in a fork, and let it save the next step, after which nothing else may be left if ``tidy``."""

    def look() -> str:
        system.use()
        wrong = judge(system, folder, *states, acknowledged=acknowledged, goes_on=True)
        if not wrong and tidy and system.is_ours and leftovers(folder):
            return f"leftovers: {leftovers(folder)}"
        return wrong

    ended = forks.run(look)
    if ended.hung or ended.code:
        return f"crash: the reader ended with {ended.code}"
    return ended.error or str(ended.value)


def random_times(system: System, tally: Tally, extent: Extent) -> None:
    """Kill a process that saves one step after the other, every second time in the background, at a random time."""
    for number in range(extent.times(500)):
        random_time([system], number, tally, background=bool(number % 2))


def random_time(
    systems: Sequence[System], number: int, tally: Tally, *, background: bool, overwrite: bool = False
) -> None:
    """Kill a process that saves with each of the systems in turn: step after step, or one step again and again."""
    first, chance = systems[0], random.Random(f"{systems[0].name} {number}")

    def save(step: int) -> Save:
        return Save(5 if overwrite else step, 3, overwrite, background)

    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        notes, run, end = f"{folder}/notes", f"{folder}/run", time.monotonic() + 60
        is_first = number % 5 == 4  # kill within the first save
        with forks.running(lambda: _save_for_ever(systems, save, folder, notes)) as [writer]:
            while not (os.path.exists(run) if is_first else _acknowledged(notes)) and time.monotonic() < end:
                time.sleep(0.001)  # until it is under way
            hangs = time.monotonic() >= end
            time.sleep(chance.random() * (0.04 if is_first else 0.2 if first.is_ours else 0.5))
            has_ended = os.waitid(os.P_PID, writer, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        sure = _acknowledged(notes)
        states = Scenario("", tuple(map(save, range(1, sure + 2)))).states()
        wrong = judged(first, run, states[-2:], acknowledged=False)
        if has_ended or hangs:
            wrong = f"blocked: save {sure + 1} hangs or ended the writer"
    tally.add(wrong, f"random time {number}, after step {sure}")


def _acknowledged(notes: str) -> int:
    if not os.path.exists(notes):
        return 0
    with open(notes) as file:
        return int((file.read().split() or ["0"])[-1])


def _save_for_ever(systems: Sequence[System], save: Callable[[int], Save], folder: str, notes: str) -> None:
    with open(notes, "ab", buffering=0) as file:
        for step in range(1, 10_000):
            system = systems[step % len(systems)]
            system.use()
            save(step).run(system, f"{folder}/run", step)
            file.write(b"%d\n" % step)
