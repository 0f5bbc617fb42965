"""Lose power during and after saves: record them, replay the record (power_loss.py), judge what may be on disk."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from flax_ckpt_compat._core.local import temporaries
from tests.reliability import forks, shim
from tests.reliability.judge import judge
from tests.reliability.power_loss import Call, Disk, digest, materialise, read_record
from tests.reliability.tally import Tally
from tests.reliability.workloads import STEPS, Scenario, System

_BATCH = 50
_NEXT_SAVE_EVERY = 5


class State(NamedTuple):
    """What may be on disk after a loss of power.

    Attributes:
        tree: names and contents.
        before, after: the steps that may be there.
        acknowledged: it has to be ``after``.
        where: when the power was lost.
    """

    tree: dict[str, Any]
    before: STEPS
    after: STEPS
    acknowledged: bool
    where: str


def lose_power(system: System, scenario: Scenario, tally: Tally, samples: int, limit: int = 10**9) -> None:
    """Judge states of a scenario.

    Args:
        system: that saves.
        scenario: all of its saves are recorded.
        tally: of the outcomes.
        samples: about how many states after each call; equal ones are judged once.
        limit: of states, chosen by chance.
    """
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        record = f"{folder}/record"
        os.mkdir(f"{folder}/root")
        ended = forks.run(lambda: _save_all(system, scenario, f"{folder}/root", record))
        assert not ended.error and not ended.code, ended
        calls = list(read_record(record))
        judge_all(
            system, list(states(calls, f"{folder}/root", scenario.states(), samples)), tally, scenario.name, limit
        )


def _save_all(system: System, scenario: Scenario, root: str, record: str) -> None:
    system.use()
    shim.arm(root, record=record)
    for number, save in enumerate(scenario.saves, 1):
        save.run(system, f"{root}/run", number)
        shim.mark(str(number))
    shim.disarm()


def states(calls: list[Call], root: str, steps: list[STEPS], samples: int) -> Iterator[State]:
    """Yield the different states that a loss of power leaves.

    Args:
        calls: the record; a mark is the number of a save that was acknowledged.
        root: the directory that was recorded.
        steps: what is there after each save.
        samples: states after each call.
    """
    disk, chance, seen, saved = Disk(root), random.Random(len(calls)), set[Any](), 0
    for number, call in enumerate(calls):
        disk.apply(call)
        acknowledged = call.op == "mark"
        saved = max(saved, int(call.first)) if acknowledged else saved
        before, after = steps[saved], steps[min(saved + (not acknowledged), len(steps) - 1)]
        for tree in disk.losses(chance, samples):
            key = (digest(tree), saved, acknowledged)
            if key not in seen:
                seen.add(key)
                where = (
                    f"after {number + 1} of {len(calls)} calls ({call.op} {os.path.relpath(call.first, root)[-40:]})"
                )
                yield State(tree, before, after, acknowledged, where)


def judge_all(system: System, found: list[State], tally: Tally, name: str, limit: int) -> None:
    """Write each state to a directory, look at it as the system does after a reboot, and count the outcome."""
    random.Random(len(found)).shuffle(found)
    found = found[:limit]
    for start in range(0, len(found), _BATCH):
        batch = found[start : start + _BATCH]
        ended = forks.run(lambda batch=batch, start=start: _judged(system, batch, start), timeout=120)
        outcomes = ended.value or [f"crash: {ended.error or ended}"] * len(batch)
        for state, wrong in zip(batch, outcomes, strict=True):
            tally.add(wrong, f"{name}, {state.where}")


def _judged(system: System, batch: list[State], start: int) -> list[str]:
    system.use()
    temporaries.machine = lambda: "0" * 12  # after a reboot the boot id, and with it the machine's, is another
    outcomes = []
    for number, state in enumerate(batch, start):
        with tempfile.TemporaryDirectory(prefix="reliability-", ignore_cleanup_errors=True) as folder:
            materialise(state.tree, f"{folder}/root")
            goes_on, acknowledged = number % _NEXT_SAVE_EVERY == 0, state.acknowledged
            run = f"{folder}/root/run"
            outcomes.append(judge(system, run, state.before, state.after, acknowledged=acknowledged, goes_on=goes_on))
            keep = os.environ.get("RELIABILITY_KEEP")
            if outcomes[-1] and keep:
                shutil.rmtree(f"{keep}/{system.name} {number}", ignore_errors=True)
                materialise(state.tree, f"{keep}/{system.name} {number}")
    return outcomes
