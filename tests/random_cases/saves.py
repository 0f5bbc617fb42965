"""Sequences of saves into one directory: steps, texts, prefixes, keep, overwrite, and both formats mixed.

The model is real legacy Flax with a directory for each prefix, since it deletes what another prefix saved beside it.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from flax import errors as flax_errors
from flax.training import checkpoints as flax_checkpoints
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints
from flax_ckpt_compat.errors import CheckpointError
from tests.support.saves import names, tree, use_flag

KEEPS = (0, 1, 2, 3, 1e6, np.inf)
number = st.one_of(
    st.integers(-12, 40),
    st.integers(-8, 30).map(lambda quarter: quarter / 4),
    st.integers(-5, 20).map(np.int64),
    st.integers(-5, 20).map(lambda half: np.float32(half / 2)),
    st.integers(0, 20).map(np.array),
    st.sampled_from([1e22, 1e-7, 10**17, np.float64(0.1)]),
)
# None is the beginning of another: there Flax deletes the other prefix's files, and we do not.
PREFIXES = ("checkpoint_", "opt_", "best_opt_", "cifar10_64_", "m", "a.b_")
# Beginnings of one another, but no name of one is a name of another.
APART = ("checkpoint_", "checkpoint_best_", "opt_", "opt_ema_", "m", "model_", "a.b_")
# ``v23`` is step 23 of one and step 3 of another.
OVERLAPPING_PREFIXES = ("v", "v2", "v20")
TEXTS = ("best", "final.msgpack", "_x")


def calls(prefixes: tuple[str, ...], steps: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Calls of save_checkpoint, each with the format that it is saved in."""
    call = st.fixed_dictionaries(
        {"step": steps, "prefix": st.sampled_from(prefixes), "flag": st.booleans()},
        optional={
            "keep": st.sampled_from(KEEPS),
            "overwrite": st.booleans(),
            "keep_every_n_steps": st.sampled_from([1, 2, 5, 0.5, 10]),
        },
    )
    return st.lists(call, min_size=1, max_size=10)


def one_spelling(sequence: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each step spelled in one way only: how Flax orders 7 and 7.0 depends on the file system."""
    spelled: dict[float, Any] = {}
    return [call | {"step": spelled.setdefault(float(call["step"]), call["step"])} for call in sequence]


SEPARATE = st.tuples(calls(APART, number).map(one_spelling), st.lists(st.sampled_from(TEXTS), max_size=2, unique=True))
OVERLAPPING = st.tuples(calls(OVERLAPPING_PREFIXES, st.integers(0, 60)))


def run(module: Any, folder: str, call: dict[str, Any], value: int) -> str:
    """The name that a save gave, or the class of its error."""
    arguments = {name: given for name, given in call.items() if name != "flag"}
    try:
        with use_flag(call["flag"] and module is checkpoints):
            return Path(module.save_checkpoint(folder, tree(value), **arguments)).name
    except flax_errors.InvalidCheckpointError:
        return "InvalidCheckpointError"


def check_separate(sequence: list[dict[str, Any]], texts: list[str]) -> None:
    """Outcome, names, latest, steps and values are those of Flax with the prefix alone; text steps stay beside them."""
    with TemporaryDirectory() as folder:
        mine, saved, values = f"{folder}/ours", set[str](), dict[str, int]()
        for text in texts:
            name = Path(checkpoints.save_checkpoint(mine, tree(-1), text, "opt_")).name
            saved.add(name)
            values[name] = -1
        for value, call in enumerate(sequence):
            expected = run(flax_checkpoints, _own(folder, call["prefix"]), call, value)
            found = run(checkpoints, mine, call, value)
            assert found == expected, (value, call)
            values[found] = value
            left = {name for prefix in APART for name in names(_own(folder, prefix))}
            assert set(names(mine)) == left | saved, (value, call)
        for prefix in {call["prefix"] for call in sequence}:
            theirs = flax_checkpoints.latest_checkpoint(_own(folder, prefix), prefix)
            latest = checkpoints.latest_checkpoint(mine, prefix)
            assert Path(str(latest)).name == Path(str(theirs)).name
            steps = flax_checkpoints.available_steps(_own(folder, prefix), prefix, float)
            assert checkpoints.available_steps(mine, prefix, float) == steps
        _check_values(mine, values)


def check_overlapping(sequence: list[dict[str, Any]]) -> None:
    """Names that several prefixes share: what a save gave is there, and what Flax keeps of a prefix alone is kept."""
    with TemporaryDirectory() as folder:
        mine, values = f"{folder}/ours", dict[str, int]()
        for value, call in enumerate(sequence):
            try:
                found = run(checkpoints, mine, call, value)
            except CheckpointError as error:
                found = type(error).__name__
            if found not in names(mine):
                assert found == "InvalidCheckpointError", (value, call)
                continue
            values[found] = value
            # Of a prefix that ends in a digit, Flax's keep_every_n_steps takes that for a part of the step.
            run(flax_checkpoints, _own(folder, call["prefix"]), call | {"prefix": "_"}, value)
            kept = set[str]()
            for prefix in OVERLAPPING_PREFIXES:
                if prefix != call["prefix"] and found.startswith(prefix):  # another prefix has taken the name over
                    Path(_own(folder, prefix), "_" + found.removeprefix(prefix)).unlink(missing_ok=True)
                kept.update(prefix + name[1:] for name in names(_own(folder, prefix)))
            assert kept <= set(names(mine)), (value, call)
        _check_values(mine, values)


def _own(folder: str, prefix: str) -> str:
    return f"{folder}/flax{APART.index(prefix) if prefix in APART else OVERLAPPING_PREFIXES.index(prefix)}"


def _check_values(folder: str, values: dict[str, int]) -> None:
    """Every checkpoint holds what was saved last under its name."""
    for name in names(folder):
        assert checkpoints.restore_checkpoint(os.path.join(folder, name), None)["n"] == values[name], name
