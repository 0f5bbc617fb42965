"""The systems that are compared, what they save, and what has to be there afterwards."""

import dataclasses
import functools
from typing import Any

import flax
import jax
import numpy as np
from flax.training import checkpoints as flax_checkpoints

from flax_ckpt_compat import checkpoints, config

STEPS = dict[int, int]  # step → number of the value that it holds


@functools.cache
def tree(number: int) -> dict[str, Any]:
    """Return the value with a number: small and large arrays, numbers and text, some of them jax arrays."""
    chance = np.random.default_rng(number)
    return {
        "large": chance.random(9_000),
        "middle": chance.integers(0, 255, 3_000, np.uint8),
        "small": [np.full(3, number), {"x": f"text {number}"}],
        "n": number,
    }


@functools.cache
def shared_tree(number: int) -> dict[str, Any]:
    """Return the value with a number of saves by several processes, as one process sees it."""
    split = {str(i): np.full((16, 256), number + i, np.float32) for i in range(2)}
    return {"n": number, "split": split, "same": np.full(1000, number)}


def same_leaves(restored: Any, expected: Any) -> bool:
    """Return whether two trees have the same leaves, bit for bit, in this order."""
    found, wanted = jax.tree.leaves(restored), jax.tree.leaves(expected)
    if len(found) != len(wanted):
        return False
    return all(_same(one, other) for one, other in zip(found, wanted, strict=True))


def _same(one: Any, other: Any) -> bool:
    if isinstance(other, str):
        return isinstance(one, str) and one == other
    one, other = np.asarray(one), np.asarray(other)
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


@dataclasses.dataclass(frozen=True)
class System:
    """One way to save and restore."""

    name: str  # as the table shows it
    module: Any  # with the functions of ``flax.training.checkpoints``
    orbax: bool  # the format
    settings: tuple[tuple[str, Any], ...] = ()  # of ours
    shared: bool = False  # several processes save; one restores

    @property
    def is_ours(self) -> bool:
        """Whether it is this library."""
        return self.module is checkpoints

    def with_settings(self, **settings: Any) -> "System":
        """Return this system with settings of ours."""
        return dataclasses.replace(self, settings=tuple(settings.items()))

    def use(self) -> None:
        """Let this process save as the system does."""
        flax.config.update("flax_use_orbax_checkpointing", self.orbax)
        if self.settings:
            for name, value in self.settings:
                config.update(name, value)

    def tree(self, number: int) -> dict[str, Any]:
        """Return the value with a number."""
        return shared_tree(number) if self.shared else tree(number)

    def restore(self, folder: str, step: int | None = None) -> Any:
        """Restore, without a target where one process saved; None where nothing is found."""
        target = jax.tree.map(np.zeros_like, shared_tree(0)) if self.shared else None
        restored = self.module.restore_checkpoint(folder, target, step)
        return None if restored is target else restored

    def number_of(self, restored: Any) -> int | None:
        """Return which value a restored tree holds; None if it holds none of them, or half of one."""
        try:
            number = int(restored["n"])
            return number if same_leaves(restored, self.tree(number)) else None
        except (TypeError, KeyError, ValueError):
            return None

    def steps(self, folder: str) -> list[int]:
        """Return the steps that it lists, in any order."""
        return [int(step) for step in self.module.available_steps(folder)]


SYSTEMS = (
    System("ours, msgpack", checkpoints, orbax=False),
    System("ours, Orbax's format", checkpoints, orbax=True),
    System("Flax, flag off", flax_checkpoints, orbax=False),
    System("Flax, flag on", flax_checkpoints, orbax=True),
)


SHARED_SYSTEMS = tuple(dataclasses.replace(SYSTEMS[number], shared=True) for number in (0, 1, 3))


@dataclasses.dataclass(frozen=True)
class Save:
    """One save; its value is numbered by its place in its scenario."""

    step: int
    keep: int = 5
    overwrite: bool = False
    background: bool = False  # by an AsyncManager, and waited for

    def run(self, system: System, folder: str, number: int) -> None:
        """Save the value with this number, and return when it is acknowledged."""
        manager = system.module.AsyncManager() if self.background else None
        system.module.save_checkpoint(
            folder, system.tree(number), self.step, keep=self.keep, overwrite=self.overwrite, async_manager=manager
        )
        if manager:
            manager.wait_previous_save()
            if not system.is_ours and manager.save_future is not None:
                manager.save_future.result()  # Flax forgets the failure of a save that has ended

    def after(self, before: STEPS, number: int) -> STEPS:
        """Return the steps that have to be there afterwards."""
        steps = {step: held for step, held in before.items() if not (self.overwrite and step >= self.step)}
        steps[self.step] = number
        return {step: steps[step] for step in sorted(steps)[-self.keep :]}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Saves one after the other into one directory; what is injected hits the last."""

    name: str  # what is special
    saves: tuple[Save, ...]

    def states(self) -> list[STEPS]:
        """Return what is there after no save, one save, and so on."""
        states: list[STEPS] = [{}]
        for number, save in enumerate(self.saves, 1):
            states.append(save.after(states[-1], number))
        return states


SCENARIOS = (
    Scenario("first", (Save(1),)),
    Scenario("new", (Save(1), Save(2))),
    Scenario("overwrite", (Save(1), Save(2), Save(2, overwrite=True))),
    Scenario("overwrite older", (Save(1), Save(5), Save(9), Save(5, overwrite=True))),
    Scenario("keep", (Save(1), Save(2), Save(3, keep=1))),
    Scenario("async", (Save(1), Save(2), Save(3, keep=1, background=True))),
    Scenario("async overwrite", (Save(1), Save(2), Save(2, overwrite=True, background=True))),
)
