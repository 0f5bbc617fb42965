"""Kill one process of a team at random points of saves, and look at what the others say and what is left."""

from __future__ import annotations

import random
import tempfile
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_ckpt_compat import checkpoints, config
from tests.multiprocess import jobs
from tests.support.team import Outcome, Team

BOUND = 2.0
# Of looks and a busy machine; process 0 itself is waited for twice as long as the others.
SLACK = 3.0


def tree(step: int) -> dict[str, Any]:
    """About a megabyte over all processes, which tells which save it is from."""
    where = jobs.mesh()
    split = {
        str(i): jobs.put(np.full((96, 256), step + i, np.float32), NamedSharding(where, P("x"))) for i in range(16)
    }
    return {"n": step, "split": split, "v": np.full(1000, step)}


def save_until_killed(folder: str, orbax: bool, first: int, background: bool, notes: str, wait: float) -> None:
    """Saves step after step; process 0 writes down each that is committed."""
    jobs.use(orbax)
    manager = checkpoints.AsyncManager() if background else None
    with config.override(coordination_timeout=wait):
        for step in range(first, first + 10_000):
            checkpoints.save_checkpoint_multiprocess(folder, tree(step), step, keep=2, async_manager=manager)
            if manager:
                manager.wait_previous_save()
            with open(f"{notes}-{jax.process_index()}", "w") as file:
                file.write(str(step))


def check(folder: str, orbax: bool, sure: int) -> None:
    """The latest step is whole, and is the one that was acknowledged or a later one; then saves the next."""
    jobs.use(orbax)
    latest = checkpoints.available_steps(folder)[-1]
    assert latest in (sure, sure + 1), (latest, sure)
    for step in checkpoints.available_steps(folder):
        got, wanted = checkpoints.restore_checkpoint(folder, tree(-1), step), tree(step)
        assert got["n"] == step
        np.testing.assert_array_equal(got["v"], wanted["v"])
        for name, leaf in got["split"].items():
            jobs.check_shards(name, leaf, np.full((96, 256), step + int(name), np.float32))
    jobs.barrier("restored")
    with config.override(coordination_timeout=30.0):
        checkpoints.save_checkpoint_multiprocess(folder, tree(latest + 1), latest + 1, keep=2)
    assert checkpoints.available_steps(folder)[-1] == latest + 1
    jobs.barrier("saved")
    if jax.process_index() == 0:
        left = [name for name in jobs.names(folder) if name.startswith(".")]
        assert not left, left


def trial(folder: str, orbax: bool, chance: random.Random) -> None:
    """One kill of one of two processes, in a folder that holds at least one checkpoint."""
    wait, count, victim = BOUND / 2, 2, chance.randrange(2)
    outside, background = chance.random() < 0.5, chance.random() < 0.3
    before = checkpoints.available_steps(folder)[-1]
    with tempfile.TemporaryDirectory() as notes:
        team = Team(count, outside=outside)
        team.start(save_until_killed, folder, orbax, int(before) + 1, background, f"{notes}/note", wait)
        while not _acknowledged(notes, count):
            assert not team.answered(), team.finish()
            time.sleep(0.01)
        time.sleep(chance.random() * 0.15)
        team.kill(victim)
        killed = time.monotonic()
        outcomes = team.finish(60)
        seconds = time.monotonic() - killed
        acknowledged = _acknowledged(notes, count)
        team.close()
    check_end(outcomes, victim, outside)
    bound = wait * (2 if victim == 0 else 1) + SLACK
    assert seconds < bound, f"the others took {seconds:.1f} s after {victim} of {count} was killed"
    team = Team(count)
    try:
        team.call(check, folder, orbax, max(acknowledged))
    finally:
        team.close()


def _acknowledged(notes: str, count: int) -> list[int]:
    found = []
    for index in range(count):
        try:
            with open(f"{notes}/note-{index}") as file:
                found.append(int(file.read() or -1))
        except FileNotFoundError:
            continue
    return [step for step in found if step >= 0]


def check_end(outcomes: list[Outcome], victim: int, outside: bool) -> None:
    """Each of the others has named the dead process."""
    for index, outcome in enumerate(outcomes):
        if index == victim:
            assert outcome.died == -9, outcome
        elif outcome.died is not None:
            assert victim == 0 and not outside, outcome
            assert "leader task" in outcome.log, outcome.log
        else:
            assert "ProcessTimeoutError" in outcome.kinds, outcome
            assert f"process {victim} of" in outcome.error or (victim == 0 and "process 0," in outcome.error), outcome


def prepare(folder: str, orbax: bool) -> None:
    """A first checkpoint."""
    team = Team(2)
    try:
        team.call(jobs.save_small, folder, orbax, 0)
        team.call(save_first, folder, orbax)
    finally:
        team.close()


def save_first(folder: str, orbax: bool) -> None:
    """The first step."""
    jobs.use(orbax)
    checkpoints.save_checkpoint_multiprocess(folder, tree(1), 1)
