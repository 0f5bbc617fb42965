"""Which checkpoints are left after a sequence of saves: ours on both formats against real legacy Flax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import errors as flax_errors
from flax.training import checkpoints as flax_checkpoints
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints as ours
from tests.support.profiles import examples
from tests.support.saves import names, new_folder, tree, use_flag

# None is the beginning of another: there Flax deletes the other prefix's files, and we do not.
PREFIXES = ("checkpoint_", "opt_", "best_opt_", "cifar10_64_", "m", "a.b_")
KEEPS = (0, 1, 2, 3, 1e6, np.inf)

number = st.one_of(
    st.integers(-12, 40),
    st.integers(-8, 30).map(lambda quarter: quarter / 4),
    st.integers(-5, 20).map(np.int64),
    st.integers(-5, 20).map(lambda half: np.float32(half / 2)),
    st.integers(0, 20).map(np.array),
    st.sampled_from([1e22, 1e-7, 10**17, np.float64(0.1)]),
)
call = st.fixed_dictionaries(
    {"step": number},
    optional={
        "prefix": st.sampled_from(PREFIXES),
        "keep": st.sampled_from(KEEPS),
        "overwrite": st.booleans(),
        "keep_every_n_steps": st.sampled_from([1, 2, 5, 0.5, 10]),
    },
)
ascending = st.lists(st.integers(-6, 40), min_size=3, max_size=12, unique=True).map(sorted)


def run(module: Any, folder: str, call: dict[str, Any]) -> Any:
    """The path's last part, or the class of the error, of one save."""
    try:
        return Path(module.save_checkpoint(folder, tree(), **call)).name
    except flax_errors.InvalidCheckpointError:
        return "InvalidCheckpointError"


def one_spelling(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each step spelled in one way only: how Flax orders 7 and 7.0 depends on the file system."""
    spelled: dict[float, Any] = {}
    return [call | {"step": spelled.setdefault(float(call["step"]), call["step"])} for call in calls]


def compare(calls: list[dict[str, Any]], flag: bool) -> None:
    """Runs the calls with both, and compares the outcome of every call and what is left after it."""
    with new_folder() as folder:
        theirs_folder, ours_folder = f"{folder}/theirs", f"{folder}/ours"
        for index, call in enumerate(calls):
            with use_flag(False):
                expected = run(flax_checkpoints, theirs_folder, call)
            with use_flag(flag):
                assert run(ours, ours_folder, call) == expected, (index, call)
            assert names(ours_folder) == names(theirs_folder), (index, call)
        for prefix in {call.get("prefix", "checkpoint_") for call in calls}:
            expected = flax_checkpoints.latest_checkpoint(theirs_folder, prefix)
            found = ours.latest_checkpoint(ours_folder, prefix)
            assert (found and Path(found).name) == (expected and Path(expected).name)
            expected_steps = flax_checkpoints.available_steps(theirs_folder, prefix, float)
            assert ours.available_steps(ours_folder, prefix, float) == expected_steps


# The flag is the same for all examples of one test.
bounded = settings(
    max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.mark.slow
@bounded
@given(st.lists(call, min_size=1, max_size=10).map(one_spelling))
@example([{"step": 5}, {"step": 3}])
@example([{"step": 5}, {"step": 9, "keep": 3}, {"step": 7, "keep": 3, "overwrite": True}])
@example([{"step": 0.9}, {"step": 0.7}, {"step": 0.7, "overwrite": True}])
def test_any_sequence_of_saves_leaves_what_flax_leaves(flag: bool, calls: list[dict[str, Any]]) -> None:
    """Steps, prefixes, keep, overwrite and keep_every_n_steps act as in legacy Flax, errors included."""
    compare(calls, flag)


@pytest.mark.slow
@bounded
@given(ascending, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3, 7, 10]))
@example(list(range(0, 60, 5)), 1, 20)
@example([100, 205, 250, 299, 310, 420], 1, 100)
@example(list(range(-6, 5)), 2, 3)
@example(list(range(11)), 2, 3)
def test_growing_steps_with_keep_every_leave_what_flax_leaves(
    flag: bool, numbers: list[int], keep: int, every: int
) -> None:
    """keep_every_n_steps keeps the same checkpoints, step 0 never."""
    compare([{"step": step, "keep": keep, "keep_every_n_steps": every} for step in numbers], flag)


@pytest.mark.parametrize(
    ("steps", "arguments", "left"),
    [
        ([0, 1, 2, 10], {"keep": 3}, [1, 2, 10]),
        (range(11), {"keep": 2, "keep_every_n_steps": 3}, [1, 4, 7, 9, 10]),
        (range(0, 60, 5), {"keep_every_n_steps": 20}, [5, 25, 45, 55]),
        ([1, 2, 3], {"keep": 0}, [1, 2, 3]),
        ([1, 2, 3], {"keep": np.inf}, [1, 2, 3]),
        ([1, 2, 3], {"keep": 1e6}, [1, 2, 3]),
    ],
)
def test_what_flax_was_measured_to_leave(
    flag: bool, tmp_path: Path, steps: list[int], arguments: dict[str, Any], left: list[int]
) -> None:
    """The surviving steps are those that were written down when Flax 0.12.8 was measured."""
    for step in steps:
        ours.save_checkpoint(tmp_path, tree(step), step, **arguments)
    assert ours.available_steps(tmp_path) == left
