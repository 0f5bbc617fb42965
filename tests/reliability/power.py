"""Lose power during and after saves: record them, replay the record (power_loss.py), judge what may be on disk."""

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flax_ckpt_compat._core.local import atomic, temporaries
from tests.reliability import forks, shim
from tests.reliability.judge import judge
from tests.reliability.power_loss import Call, Disk, digest, materialise, read_record
from tests.reliability.tally import Extent, Tally
from tests.reliability.workloads import SCENARIOS, STEPS, Scenario, System

_BATCH = 50
_NEXT_SAVE_EVERY = 5


class State(NamedTuple):
    """What may be on disk after a loss of power."""

    tree: dict[str, Any]  # names and contents
    before: STEPS
    after: STEPS  # one of these steps is there
    acknowledged: bool  # it has to be ``after``
    where: str  # when the power was lost


def lose_power(system: System, tally: Tally, extent: Extent) -> None:
    """Judge states of each scenario, all of whose saves are recorded."""
    for scenario in extent.of(SCENARIOS):
        with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
            os.mkdir(f"{folder}/root")
            ended = forks.run(lambda scenario=scenario, folder=folder: _save_all(system, scenario, folder))
            assert not ended.error and not ended.code, ended
            calls = list(read_record(f"{folder}/record"))
        judge_record(system, calls, f"{folder}/root", scenario, tally, extent, limit=400)


def _save_all(system: System, scenario: Scenario, folder: str) -> None:
    system.use()
    shim.arm(f"{folder}/root", record=f"{folder}/record")
    for number, save in enumerate(scenario.saves, 1):
        save.run(system, f"{folder}/root/run", number)
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


def judge_record(
    system: System, calls: list[Call], root: str, scenario: Scenario, tally: Tally, extent: Extent, limit: int
) -> None:
    """Write each state that a recorded scenario may leave to a directory, look at it as after a reboot, and count.

    Of more states than the limit, some by chance."""
    found = list(states(calls, root, scenario.states(), samples=extent.times(16, 2)))
    random.Random(len(found)).shuffle(found)
    found = found[: extent.times(limit, 10)]
    for batch in (found[start : start + _BATCH] for start in range(0, len(found), _BATCH)):
        ended = forks.run(lambda batch=batch: _judged(system, batch), timeout=120)
        outcomes = ended.value or [f"crash: {ended.error or ended}"] * len(batch)
        for state, wrong in zip(batch, outcomes, strict=True):
            tally.add(wrong, f"{scenario.name}, {state.where}")


def _judged(system: System, batch: Sequence[State]) -> list[str]:
    system.use()
    temporaries._boot, atomic._SWAP_SECONDS = lambda: "0" * 12, 0.0  # after a reboot, with no writer between renames
    outcomes = []
    for number, state in enumerate(batch):
        with tempfile.TemporaryDirectory(prefix="reliability-", ignore_cleanup_errors=True) as folder:
            materialise(state.tree, f"{folder}/root")
            goes_on, acknowledged = number % _NEXT_SAVE_EVERY == 0, state.acknowledged
            run = f"{folder}/root/run"
            outcomes.append(judge(system, run, state.before, state.after, acknowledged=acknowledged, goes_on=goes_on))
            keep = os.environ.get("RELIABILITY_KEEP")
            if outcomes[-1] and keep:
                materialise(state.tree, tempfile.mkdtemp(prefix=f"{system.name} ", dir=keep) + "/root")
    return outcomes
