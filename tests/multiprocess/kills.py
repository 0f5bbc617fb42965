"""Kills one process of a team at random points of saves: ``python -m tests.multiprocess.kills --trials 50``.

After each kill: the others have ended within the bound with an error that names the dead process; the directory
restores the step before (or the new one, if its commit was through); a new team saves the next step.

jax's own runtime ends the whole job too, in two ways. A process that is silent is given up after its heartbeat
timeout (100 s unless set), which is far above the bound here, so ours speaks first. The coordinator, which lives in
process 0, takes all others with it at once if it dies; every second kill of process 0 lets it do so, and every other
one has the coordinator in a process of its own, so that it can be seen what ours does.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_ckpt_compat import checkpoints, config
from tests.multiprocess import jobs, store_jobs
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


def check(folder: str, orbax: bool, sure: int) -> int:
    """The latest step is whole, and is the one that was acknowledged or a later one; then saves the next.

    Returns:
        The step that was found.
    """
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
    return latest


def trial(
    folder: str, orbax: bool, chance: random.Random, *, quick: bool = False, server: Mapping[str, str] | None = None
) -> str:
    """One kill.

    Args:
        folder: that holds at least one checkpoint.
        orbax: the format.
        chance: decides who is killed, and when.
        quick: by two processes only, so that it takes less time.
        server: variables that lead to the store, if the folder is in one.

    Returns:
        What kind of end the others found.
    """
    wait = BOUND / 2 if quick else BOUND
    count = 2 if quick else chance.choice([2, 2, 3, 4])
    victim = chance.randrange(count)
    outside, background = chance.random() < 0.5, chance.random() < 0.3
    before = checkpoints.available_steps(folder)[-1]
    with tempfile.TemporaryDirectory() as notes:
        team = _led(Team(count, outside=outside), server)
        team.start(save_until_killed, folder, orbax, int(before) + 1, background, f"{notes}/note", wait)
        while not _acknowledged(notes, count):
            assert not team.answered(), team.finish()
            time.sleep(0.01)
        time.sleep(chance.random() * (0.6 if server else 0.15))
        team.kill(victim)
        killed = time.monotonic()
        outcomes = team.finish(60)
        seconds = time.monotonic() - killed
        acknowledged = _acknowledged(notes, count)
        team.close()
    end = _end(outcomes, victim, outside)
    bound = wait * (2 if victim == 0 else 1) + SLACK
    assert seconds < bound, f"the others took {seconds:.1f} s after {victim} of {count} was killed"
    team = _led(Team(count), server)
    try:
        found = team.call(check, folder, orbax, max(acknowledged))
    finally:
        team.close()
    return f"{end}; {'the new step' if found[0] > max(acknowledged) else 'the step before'}"


def _led(team: Team, server: Mapping[str, str] | None) -> Team:
    team.call(store_jobs.lead_to, [server or {}] * team.count)
    return team


def _acknowledged(notes: str, count: int) -> list[int]:
    found = []
    for index in range(count):
        try:
            with open(f"{notes}/note-{index}") as file:
                found.append(int(file.read() or -1))
        except FileNotFoundError:
            continue
    return [step for step in found if step >= 0]


def _end(outcomes: list[Outcome], victim: int, outside: bool) -> str:
    """What the others said, each of which has to name the dead process."""
    ends = set()
    for index, outcome in enumerate(outcomes):
        if index == victim:
            assert outcome.died == -9, outcome
        elif outcome.died is not None:
            assert victim == 0 and not outside, outcome
            assert "leader task" in outcome.log, outcome.log
            ends.add("jax ended them, naming process 0's coordinator")
        else:
            assert "ProcessTimeoutError" in outcome.kinds, outcome
            assert f"process {victim} of" in outcome.error or (victim == 0 and "process 0," in outcome.error), outcome
            ends.add("ProcessTimeoutError naming it")
    return " and ".join(sorted(ends))


def main() -> None:
    """Runs trials and prints how they ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--format", choices=["msgpack", "orbax"], required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="save to an S3 server on loopback")
    arguments = parser.parse_args()
    chance, ends = random.Random(arguments.seed), collections.Counter[str]()
    with _folder(arguments.store) as (folder, server):
        orbax = arguments.format == "orbax"
        prepare(folder, orbax, server)
        for number in range(arguments.trials):
            end = trial(folder, orbax, chance, server=server)
            ends[end] += 1
            print(number, end, flush=True)
    for end, times in ends.most_common():
        print(f"{times:4} {end}")


@contextmanager
def _folder(in_store: bool) -> Iterator[tuple[str, Mapping[str, str]]]:
    """A folder, and the variables that lead to it."""
    if not in_store:
        with tempfile.TemporaryDirectory() as folder:
            yield folder, {}
        return
    from tests.support import s3

    with s3.serving() as proxy:
        server = s3.environment(proxy)
        os.environ.update(server)
        yield f"{s3.new_bucket(proxy).url}/run", server


def prepare(folder: str, orbax: bool, server: Mapping[str, str] | None = None) -> None:
    """A first checkpoint."""
    team = _led(Team(2), server)
    try:
        team.call(jobs.save_small, folder, orbax, 0)
        team.call(save_first, folder, orbax)
    finally:
        team.close()


def save_first(folder: str, orbax: bool) -> None:
    """The first step."""
    jobs.use(orbax)
    checkpoints.save_checkpoint_multiprocess(folder, tree(1), 1)


if __name__ == "__main__":
    main()
