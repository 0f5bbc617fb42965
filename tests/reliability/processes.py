"""Saves by two processes of one job: one is killed, or one of its calls fails, or the power is lost."""

import functools
import os
import tempfile
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flax_ckpt_compat import config
from tests.multiprocess import jobs
from tests.reliability import kills, power, shim
from tests.reliability.power_loss import read_record
from tests.reliability.shim import Action
from tests.reliability.tally import Extent, Tally
from tests.reliability.workloads import SHARED_SYSTEMS, Save, Scenario, System, shared_tree
from tests.support.team import Outcome, Team

_COUNT = 2
_WAIT = 2.0  # seconds that a process waits for the others
SCENARIOS = (
    Scenario("new", (Save(1), Save(2))),
    Scenario("overwrite, keep", (Save(1), Save(2), Save(3), Save(2, keep=1, overwrite=True))),
)


def _split(number: int) -> dict[str, Any]:
    """Return `shared_tree` with its arrays spread over all processes."""
    put, where = jobs.put, NamedSharding(jobs.mesh(), PartitionSpec("x"))
    tree = shared_tree(number)
    return {**tree, "split": {name: put(values, where) for name, values in tree["split"].items()}}


def _save(name: str, save: Save, folder: str, number: int) -> None:
    system = _system(name)
    system.use()
    with config.override(coordination_timeout=_WAIT):
        system.module.save_checkpoint_multiprocess(
            f"{folder}/run", _split(number), save.step, keep=save.keep, overwrite=save.overwrite
        )


def _system(name: str) -> System:
    return next(system for system in SHARED_SYSTEMS if system.name == name)


def _save_all(name: str, saves: tuple[Save, ...], folder: str, record: str = "") -> None:
    shim.arm(folder, record=record)
    for number, save in enumerate(saves, 1):
        _save(name, save, folder, number)
        shim.mark(str(number))
        jobs.barrier(f"saved {number}")
    shim.disarm()


def _hit(name: str, scenario: Scenario, folder: str, victim: int, at: int, injection: tuple[Action, int]) -> int:
    """Run the last save, in which this process may be the victim; return how many calls it made."""
    if jax.process_index() == victim:
        shim.arm(folder, at, *injection)
    else:
        shim.arm(folder)
    try:
        _save(name, scenario.saves[-1], folder, len(scenario.saves))
    finally:
        calls = shim.disarm()
    return calls


def lose_power(system: System, tally: Tally, extent: Extent) -> None:
    """Lose power during saves of two processes of one machine."""
    team = Team(_COUNT)
    for scenario in extent.of(SCENARIOS) or SCENARIOS[1:]:
        with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
            os.mkdir(f"{folder}/root")
            team.call(_save_all, system.name, scenario.saves, f"{folder}/root", f"{folder}/record")
            calls = list(read_record(f"{folder}/record"))
        power.judge_record(system, calls, f"{folder}/root", scenario, tally, extent, limit=1_500)
    team.close()


def at_calls(system: System, tally: Tally, extent: Extent) -> None:
    """Hit the calls of each of the two processes; the other one ends with an error, or both have saved."""
    team = Team(_COUNT)
    for scenario in extent.of(SCENARIOS) or SCENARIOS[1:]:
        with tempfile.TemporaryDirectory(prefix="reliability-") as base:
            team.call(_save_all, system.name, scenario.saves[:-1], base)
            counts = _counts(system, scenario, base, team)
            cases = [
                (name, victim, at)
                for name in kills.INJECTIONS
                for victim, count in enumerate(counts)
                for at in range(1, count + 1)
            ]
            for case in extent.some(cases, scenario.name):
                if team.broken:
                    team.close()
                    team = Team(_COUNT)
                wrong = _case(system, scenario, base, team, *case)
                tally.add(wrong, f"{scenario.name}, {case} of {counts}")
    team.close()


def _counts(system: System, scenario: Scenario, base: str, team: Team) -> list[int]:
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        kills.copy(base, folder)
        return list(team.call(_hit, system.name, scenario, folder, -1, 0, (Action.PASS, 0)))


def _case(system: System, scenario: Scenario, base: str, team: Team, name: str, victim: int, at: int) -> str:
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        kills.copy(base, folder)
        outcomes = team.run(_hit, system.name, scenario, folder, victim, at, kills.INJECTIONS[name], timeout=40)
        states = scenario.states()
        if any(outcome.died or outcome.hung for outcome in outcomes):
            team.close()  # a dead writer's leftovers are removed by the next save
        wrong = _misbehaved(outcomes, victim)
        acknowledged = any(outcome.ok for outcome in outcomes)
        judged = functools.partial(kills.judged, system, f"{folder}/run", states[-2:])
        return wrong or judged(acknowledged=acknowledged, tidy=team.broken)


def _misbehaved(outcomes: list[Outcome], victim: int) -> str:
    for index, outcome in enumerate(outcomes):
        if outcome.hung:
            return f"hung: process {index}"
        # jax's coordinator lives in process 0 and takes the others with it.
        if outcome.died is not None and index != victim and victim != 0:
            return f"crash: process {index} ended with {outcome.died}: {outcome.log[-300:]}"
    return ""
