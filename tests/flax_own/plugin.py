"""A pytest plugin (``-p tests.flax_own.plugin``): Flax's own tests run on our functions.

It installs ours before anything is collected, counts the calls that reach them and those that still reach Flax's
originals, and leaves out the two cases that pin what we do on purpose otherwise.
"""

import functools
import importlib
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

# Where the caller wants the counts, as JSON.
COUNTS_VARIABLE = "FLAX_OWN_COUNTS"
# Flax, with the flag on, refuses a bare leaf and an empty tree as the whole target; we save them.
REFUSALS = {"test_save_restore_checkpoints_target_singular", "test_save_restore_checkpoints_target_empty"}
FUNCTIONS = ("save_checkpoint", "restore_checkpoint", "latest_checkpoint", "available_steps")

counts: Counter[str] = Counter()
deselected: list[str] = []


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def count(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return count


def pytest_configure(config: pytest.Config) -> None:
    """Puts counters around both sides' functions, then ours into Flax's module."""
    flax_module = importlib.import_module("flax.training.checkpoints")
    for name in FUNCTIONS:
        # Counters go in first: install() then replaces them, and only what slips past it still counts as Flax's.
        setattr(flax_module, name, _counted(f"flax.{name}", getattr(flax_module, name)))
    ours = importlib.import_module("flax_ckpt_compat.checkpoints")
    for name in FUNCTIONS:
        setattr(ours, name, _counted(f"ours.{name}", getattr(ours, name)))
    importlib.import_module("flax_ckpt_compat").install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the refusals with the flag on, found by their parameters and not by their number."""
    refusing = [item for item in items if _pins_a_refusal(item)]
    deselected.extend(item.name for item in refusing)
    config.hook.pytest_deselected(items=refusing)
    items[:] = [item for item in items if item not in refusing]


def _pins_a_refusal(item: pytest.Item) -> bool:
    # absl numbers the cases of a test and keeps their parameters as text in this table.
    parameters = getattr(getattr(item, "cls", None), "_test_params_reprs", {}).get(item.name, "")
    return item.name.rstrip("0123456789") in REFUSALS and "use_orbax=True" in parameters


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the counts and what was left out."""
    path = os.environ.get(COUNTS_VARIABLE)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"calls": counts, "deselected": sorted(deselected)}, file)
