"""Compare and time our reader against Flax's and Orbax's own, on the demo's files and trees."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
from flax import linen as nn
from flax import serialization, traverse_util
from flax.training import train_state

from flax_ckpt_compat import Plan, checkpoints, plan_restore, restore
from flax_ckpt_compat._core import equality
from flax_ckpt_compat._core.location import of_text
from flax_ckpt_compat.cli import demo_train

ROUNDS = 5


class Entry(NamedTuple):
    """A checkpoint, and whether both readers restored the same bits."""

    name: str
    format: str
    nbytes: int
    leaves: int
    identical: bool


class Timing(NamedTuple):
    """Least seconds of an operation, ours and Flax's: other programs only ever add some."""

    operation: str
    ours: float
    flax: float


def inspect_directory(workdir: str) -> list[Entry]:
    """Read every checkpoint in a directory with our reader and with its format's own library."""
    # A process killed during a save leaves a temporary, under another name.
    names = [name for name in os.listdir(workdir) if re.fullmatch(r"checkpoint_\d+", name)]
    return [_inspect(os.path.join(workdir, name)) for name in checkpoints.natural_sort(names)]


def _inspect(path: str) -> Entry:
    format, read = ("Orbax", _read_with_orbax) if os.path.isdir(path) else ("msgpack", _read_with_flax)
    return _entry(path, format, leaves(read(path)), leaves(checkpoints.restore_checkpoint(path, None)))


def _entry(
    path: str, format: str, expected: dict[str, np.ndarray[Any, Any]], found: dict[str, np.ndarray[Any, Any]]
) -> Entry:
    nbytes = of_text(path).total_size()
    return Entry(os.path.basename(path), format, nbytes, len(expected), same_bits(expected, found))


class _NamedClassifier(nn.Module):
    """The demo's model, of which the last layer has got a name."""

    @nn.compact
    def __call__(self, images: Any) -> Any:
        hidden = nn.relu(nn.Dense(512)(images))
        hidden = nn.relu(nn.Dense(512)(hidden))
        return nn.Dense(10, name="head")(hidden)


class _WideClassifier(nn.Module):
    """A model of 4.3 million parameters: with Adam's state 52 MB, so that a save is more than the wait for the disk."""

    @nn.compact
    def __call__(self, images: Any) -> Any:
        hidden = nn.relu(nn.Dense(2048)(images))
        hidden = nn.relu(nn.Dense(2048)(hidden))
        return nn.Dense(10)(hidden)


class _GrownState(train_state.TrainState):
    batch_stats: Any


def restore_into_changed_state(path: str) -> tuple[Plan, Entry, bool]:
    """Restore a checkpoint into a state with a renamed layer and a new field, by the rules that its plan proposes.

    Return the plan without rules, the comparison of all leaves, and whether the new field kept the target's value."""
    statistics_ = {"mean": np.full((512,), 0.25, np.float32)}
    plain = demo_train.create_state(seed=1, model=_NamedClassifier())
    target = _GrownState.create(  # type: ignore[no-untyped-call]
        apply_fn=plain.apply_fn, params=plain.params, tx=plain.tx, batch_stats=statistics_
    )
    plan = plan_restore(path, target)
    proposed = plan.suggestion.rules if plan.suggestion is not None else ()
    found = leaves(restore(path, target, transforms=list(proposed)))
    expected = {name.replace("Dense_2", "head"): leaf for name, leaf in leaves(_read_with_flax(path)).items()}
    kept = same_bits({"mean": found.pop("batch_stats/mean")}, statistics_)
    return plan, _entry(path, "msgpack", expected, found), kept


def time_both(workdir: str, report: Callable[[str], None]) -> list[Timing]:
    """Time saves and restores of a larger state, ours and Flax's in turn, with the flag off and on.

    Raise ImportError if this Flax has no checkpoints of its own."""
    flax_checkpoints = importlib.import_module("flax.training.checkpoints")
    state = demo_train.create_state(seed=2, model=_WideClassifier())
    jax.block_until_ready(state.params)
    before = flax.config.flax_use_orbax_checkpointing
    timings = []
    try:
        for flag, name in ((False, "msgpack"), (True, "Orbax")):
            report(f"timing {name}")
            flax.config.update("flax_use_orbax_checkpointing", flag)
            timings += _time_format(os.path.join(workdir, name), state, name, flax_checkpoints)
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)
    return timings


def _time_format(folder: str, state: Any, name: str, flax_checkpoints: Any) -> list[Timing]:
    libraries = {"ours": checkpoints, "flax": flax_checkpoints}
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(ROUNDS + 1):
        for owner, library in libraries.items():
            directory = os.path.join(folder, owner)
            start = time.perf_counter()
            library.save_checkpoint(directory, state, turn, keep=2)
            saved = time.perf_counter()
            jax.block_until_ready(library.restore_checkpoint(directory, state).params)
            restored = time.perf_counter()
            # The first turn is a warm-up, for both.
            if turn:
                seconds.setdefault(("save", owner), []).append(saved - start)
                seconds.setdefault(("restore", owner), []).append(restored - saved)
    least = {key: min(values) for key, values in seconds.items()}
    return [Timing(f"{name} {verb}", least[verb, "ours"], least[verb, "flax"]) for verb in ("save", "restore")]


def leaves(tree: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Flatten a tree to key paths joined with ``/``; list and tuple items are '0', '1', …, as in Flax's state dicts."""
    flat = traverse_util.flatten_dict(serialization.to_state_dict(tree), sep="/")
    return {name: np.asarray(leaf) for name, leaf in flat.items() if leaf is not None}


def same_bits(expected: dict[str, np.ndarray[Any, Any]], found: dict[str, np.ndarray[Any, Any]]) -> bool:
    """Return whether both have the same leaves with the same dtype, shape and bytes."""
    same_names = bool(expected) and expected.keys() == found.keys()
    return same_names and all(equality.same_bits(leaf, found[name]) for name, leaf in expected.items())


def _read_with_flax(path: str) -> Any:
    with open(path, "rb") as file:
        return serialization.msgpack_restore(file.read())


def _read_with_orbax(path: str) -> Any:
    import orbax.checkpoint as ocp  # noqa: TID251 - the demo, and only it, compares with the real Orbax

    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)
