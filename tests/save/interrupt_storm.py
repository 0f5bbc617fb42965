"""A program that saves, evicts and converts in a storm of Ctrl-C, and looks after each one what is left.

``python -m tests.save.interrupt_storm FOLDER SEED ROUNDS`` prints how many interrupts came; it fails if an acknowledged
checkpoint is lost or is not what was saved, if a thread or the program hangs, or if nothing can be saved any more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import flax
import jax.numpy as jnp
import numpy as np

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors

_HANG_SECONDS = 60
FORMATS = {"msgpack": False, "orbax": True}


def tree_of(step: int) -> dict[str, Any]:
    """A tree whose every value tells the step."""
    arrays = {f"a{number:02}": np.full(200 * number, step + number, np.float32) for number in range(20)}
    return {"step": step, "params": arrays, "large": np.full(300_000, step, np.int16), "on_device": jnp.full(9, step)}


def check_whole(found: Any, step: int) -> None:
    """Raise AssertionError if a restored tree is not that of its step."""
    expected = tree_of(step)
    assert found["step"] == step, (found["step"], step)
    assert found["params"].keys() == expected["params"].keys()
    for name, array in {**expected["params"], "large": expected["large"], "on_device": expected["on_device"]}.items():
        got = found["params"].get(name, found.get(name))
        np.testing.assert_array_equal(got, array)


class Storm:
    """Interrupts of this thread: the first after a while, perhaps more right behind it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._left, self.count = rng, 0, 0
        signal.signal(signal.SIGALRM, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        if self._left > 0:
            self._left -= 1
            self.count += 1
            raise KeyboardInterrupt

    def through(self, call: Callable[[], Any], seconds: float) -> bool:
        """Call a function that takes about so many seconds; return whether it returned."""
        done = False
        self._left = self._rng.choice([1, 1, 2, 5, 20])
        first, every = self._rng.random() * seconds + 1e-5, self._rng.choice([0.0002, 0.001, 0.005])
        while True:
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, first, every)
                    call()
                    done = True
                finally:
                    self._left = 0
            except KeyboardInterrupt:
                pass
            try:
                self._left = 0
                signal.setitimer(signal.ITIMER_REAL, 0)
                return done
            except KeyboardInterrupt:
                continue


class Run:
    """One directory of one format, and what of it was acknowledged."""

    def __init__(self, folder: Path, format: str) -> None:
        self.folder, self.format, self.step, self.acknowledged = folder / format, format, 0, -1
        self.manager = checkpoints.AsyncManager()
        self.converted = 0

    def save(self, **options: Any) -> Callable[[], Any]:
        """A save of the next step, or of the last one with ``overwrite``."""
        self.step += not options.get("overwrite")
        tree, step = tree_of(self.step), self.step
        return lambda: checkpoints.save_checkpoint(self.folder, tree, step, **options)

    def save_in_background(self) -> Callable[[], Any]:
        """Several saves in the background, and the wait for them."""
        steps = range(self.step + 1, self.step + 4)
        self.step = steps[-1]

        def call() -> None:
            for step in steps:
                checkpoints.save_checkpoint(self.folder, tree_of(step), step, keep=2, async_manager=self.manager)
            self.manager.wait_previous_save()

        return call

    def convert(self) -> Callable[[], Any]:
        """A conversion of all steps to the other format."""
        self.converted += 1
        target = self.folder.parent / f"converted-{self.format}-{self.converted}"
        return lambda: flax_ckpt_compat.convert(
            self.folder, target, to="orbax" if self.format == "msgpack" else "msgpack"
        )

    def look(self) -> None:
        """Check all that is there, against what was acknowledged."""
        with contextlib.suppress(CancelledError):  # of a save whose start was interrupted
            self.manager.wait_previous_save()
        steps = checkpoints.available_steps(self.folder)
        assert max([int(step) for step in steps], default=-1) >= self.acknowledged, (steps, self.acknowledged)
        for step in steps:
            check_whole(checkpoints.restore_checkpoint(self.folder, None, step), int(step))
        for folder in self.folder.parent.glob(f"converted-{self.format}-*"):
            for step in checkpoints.available_steps(folder):
                check_whole(flax_ckpt_compat.restore(folder, step=step), int(step))


KINDS: dict[str, Callable[[Run], Callable[[], Any]]] = {
    "new": lambda run: run.save(keep=9),
    "keep": lambda run: run.save(keep=1),
    "overwrite": lambda run: run.save(overwrite=True),
    "background": lambda run: run.save_in_background(),
    "convert": lambda run: run.convert(),
}


def storm(folder: Path, seed: int, rounds: int) -> Counter[str]:
    """Run it; return how often each kind of call was interrupted, and how often it returned."""
    rng, counts = random.Random(seed), Counter[str]()
    runs, seconds = list[Run](), dict[tuple[str, str], float]()
    for format, flag in FORMATS.items():
        flax.config.update("flax_use_orbax_checkpointing", flag)
        run = Run(folder, format)
        runs.append(run)
        for kind in (*KINDS, *KINDS):  # the first of each imports, the second is timed
            begin = time.monotonic()
            KINDS[kind](run)()
            seconds[format, kind] = time.monotonic() - begin
        run.acknowledged = run.step
    interrupts = Storm(rng)
    for number in range(rounds):
        run = rng.choice(runs)
        flax.config.update("flax_use_orbax_checkpointing", FORMATS[run.format])
        kind = rng.choice(list(KINDS))
        call, name = KINDS[kind](run), f"{run.format} {kind}"
        faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
        try:
            done = interrupts.through(call, 1.3 * seconds[run.format, kind])
        except errors.CheckpointError as error:
            raise AssertionError(f"round {number}: {name} failed: {error!r}") from error
        if done and kind != "convert":
            run.acknowledged = max(run.acknowledged, run.step)
        counts[f"{name} {'returned' if done else 'interrupted'}"] += 1
        run.look()
        faulthandler.cancel_dump_traceback_later()
    for run in runs:  # all works as before
        flax.config.update("flax_use_orbax_checkpointing", FORMATS[run.format])
        run.save()()
        run.save_in_background()()
        assert [int(step) for step in checkpoints.available_steps(run.folder)] == [run.step - 1, run.step]
        run.look()
    counts["interrupts"] = interrupts.count
    return counts


def main() -> None:
    """Run the storm of the command line, and print the counts as JSON."""
    folder, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    counts = storm(folder, seed, rounds)
    before = time.monotonic()
    while time.monotonic() - before < _HANG_SECONDS:
        alive = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
        if not any("flax_ckpt_compat" in one.name for one in alive):
            break
        time.sleep(0.05)
    faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)  # the end of the interpreter waits for threads
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
