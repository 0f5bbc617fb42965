"""Damage the files of a checkpoint, byte by byte or by chance, and restore it: found, the same, or silently wrong."""

import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import flax_ckpt_compat
from flax_ckpt_compat.errors import CheckpointError
from tests.reliability import forks
from tests.reliability.tally import Extent, Tally
from tests.reliability.workloads import System, same_leaves

_BATCH = 400
_SECONDS = 120  # a restore that takes longer hangs, also where the processor is busy
Change = Callable[[bytes], bytes]
Case = tuple[str, str, Change]  # a file, and where it is changed
# From the sizes of the files.
Cases = Callable[[dict[str, int], random.Random], Iterable[Case]]
# Makes the tree, in a fork: jax starts threads.
Tree = Callable[[], Any]


def small() -> dict[str, Any]:
    """Return a tree with one leaf of each kind of storage."""
    return {
        "a": np.arange(6, dtype=np.float32),
        "j": jnp.arange(4),
        "n": 5,
        "s": "text",
        "l": [1.5, {"x": np.ones(300)}],
    }


def large() -> dict[str, Any]:
    """Return a tree whose arrays lie in chunks of their own: some compress, some do not."""
    return {
        "noise": np.random.default_rng(0).random(50_000),
        "zeros": np.zeros((200, 300), np.float32),
        "count": np.arange(40_000),
        "n": 5,
    }


def variants(system: System) -> Sequence[System]:
    """Return a system with each of its ways to store arrays."""
    if not (system.is_ours and system.orbax):
        return [system]
    return [system.with_settings(compression=name) for name in (None, "zstd")]


def every_byte(system: System, tally: Tally, extent: Extent) -> None:
    """Flip a bit of every byte of a small checkpoint, and cut every file to every length; or as many as extent says."""

    def cases(sizes: dict[str, int], chance: random.Random) -> Iterator[Case]:
        every = [(name, at, cut) for name, size in sizes.items() for at in range(size) for cut in (False, True)]
        for name, at, cut in extent.some(every, "every byte", 20):
            how, change = ("cut", _cut(at)) if cut else ("flipped", _flip(at, chance.randrange(8)))
            yield name, f"{how} at {at}", change

    _damage(system, small, cases, tally, extent)


def random_flips(system: System, tally: Tally, extent: Extent) -> None:
    """Flip bits at random places of a larger checkpoint."""

    def cases(sizes: dict[str, int], chance: random.Random) -> Iterator[Case]:
        total = sum(sizes.values())
        for _ in range(extent.times(20_000 // len(variants(system)), 10)):
            at = chance.randrange(total)
            for name, size in sizes.items():
                if at < size:
                    yield name, f"flipped at {at}", _flip(at, chance.randrange(8))
                    break
                at -= size

    _damage(system, large, cases, tally, extent)


def _flip(at: int, bit: int) -> Change:
    return lambda data: data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def _cut(at: int) -> Change:
    return lambda data: data[:at]


def _damage(system: System, tree: Tree, cases: Cases, tally: Tally, extent: Extent) -> None:
    for variant in variants(system):
        with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
            saved = forks.run(lambda variant=variant, folder=folder: save(variant, folder, tree))
            assert saved.value, saved
            todo = list(cases(saved.value, random.Random(str(variant.settings))))
            while todo:  # a restore that ends the process ends a round
                batch = todo[:_BATCH]
                outcomes = try_all(
                    lambda variant=variant, folder=folder, batch=batch: _outcomes(variant, folder, tree, batch),
                    folder,
                    len(batch),
                )
                for (name, where, _), outcome in zip(batch, outcomes, strict=False):
                    tally.add(outcome, f"{dict(variant.settings) or ''} {os.path.relpath(name, folder)} {where}")
                todo = todo[len(outcomes) :]


def save(system: System, folder: str, tree: Tree) -> dict[str, int]:
    """Save, and return the size of each file."""
    system.use()
    system.module.save_checkpoint(folder, tree(), 1)
    files = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return {file: os.path.getsize(file) for file in sorted(files)}


def try_all(function: Callable[[], Iterator[str]], folder: str, count: int) -> list[str]:
    """Collect outcomes from a fork; where it dies or hangs in one, that is the last outcome.

    Args:
        function: yields outcomes one by one, in the fork.
        folder: for notes; they outlive the fork.
        count: of outcomes that are expected.
    """
    notes = f"{folder}/outcomes"

    def work() -> None:
        with open(notes, "w", buffering=1, encoding="utf-8") as file:
            for outcome in function():
                signal.alarm(_SECONDS)  # its default ends the process
                file.write(outcome.replace("\n", " ")[:500] + "\n")

    ended = forks.run(work, timeout=3600)
    with open(notes, encoding="utf-8") as file:
        outcomes = file.read().splitlines()
    os.unlink(notes)
    if len(outcomes) < count:
        why = "hung" if ended.code == -signal.SIGALRM else "crash"
        outcomes.append(f"{why}: the reader ended with {ended.code} {ended.error}")
    return outcomes


def _outcomes(system: System, folder: str, tree: Tree, batch: Sequence[Case]) -> Iterator[str]:
    system.use()
    signal.alarm(_SECONDS)
    for name, _, change in batch:
        with open(name, "r+b", buffering=0) as file:
            sound = file.read()
            _overwrite(file, change(sound))
            try:
                yield outcome_of(system, folder, tree)
            finally:
                _overwrite(file, sound)


def _overwrite(file: Any, data: bytes) -> None:
    """Write in place and keep the time, as a disk does that flips a bit; extended attributes stay, too."""
    status = os.fstat(file.fileno())
    file.seek(0)
    file.write(data)
    file.truncate()
    os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))


def outcome_of(system: System, folder: str, tree: Tree) -> str:
    """Restore, and return ``found``, ``same``, ``verify`` if only `verify` finds the damage, or what is wrong."""
    try:
        restored = system.restore(folder)
    except CheckpointError:
        return "found"
    except Exception as error:
        # Real Flax has no errors of its own for damage: any counts.
        return f"raw: {type(error).__name__}: {error}" if system.is_ours else "found"
    if same_leaves(restored, tree()):
        return "verify" if system.is_ours and flax_ckpt_compat.verify(folder).damaged else "same"
    if restored is None:
        return "skipped" if system.is_ours and _is_empty(folder) else "nothing: restored None"
    return "silent: other values"


def _is_empty(folder: str) -> bool:
    """Return whether a checkpoint is an empty file: ours warns and looks for another, as after an interrupted copy."""
    names = [name for name in os.listdir(folder) if name.startswith("checkpoint")]
    return any(os.path.getsize(os.path.join(folder, name)) == 0 for name in names)
