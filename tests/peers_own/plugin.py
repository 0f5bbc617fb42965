"""A pytest plugin (``-p tests.peers_own.plugin``): the own tests of Flax, or of Orbax's transformations, run on ours.

It installs ours before anything is collected, counts the calls that reach them and those that still reach Flax's
originals, and leaves out the two cases of Flax that pin what we do on purpose otherwise.
"""

import functools
import importlib
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

# Whose tests these are, and where the caller wants the counts, as JSON.
PEER, COUNTS = "PEERS_OWN_PEER", "PEERS_OWN_COUNTS"
# Flax, with the flag on, refuses a bare leaf and an empty tree as the whole target; we save them.
REFUSALS = {"test_save_restore_checkpoints_target_singular", "test_save_restore_checkpoints_target_empty"}
OF_FLAX = ("save_checkpoint", "restore_checkpoint", "latest_checkpoint", "available_steps")
OF_ORBAX = ("apply_transformations", "merge_trees", "intersect_trees")

counts: Counter[str] = Counter()
deselected: list[str] = []


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def count(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return count


def pytest_configure(config: pytest.Config) -> None:
    """Put counters around both sides' functions, then ours into the peer's module."""
    if os.environ[PEER] == "flax":
        flax_module = importlib.import_module("flax.training.checkpoints")
        ours = importlib.import_module("flax_ckpt_compat.checkpoints")
        for name in OF_FLAX:
            # Counters go in first: install() then replaces them, and only what slips past it still counts as Flax's.
            setattr(flax_module, name, _counted(f"flax.{name}", getattr(flax_module, name)))
            setattr(ours, name, _counted(f"ours.{name}", getattr(ours, name)))
        importlib.import_module("flax_ckpt_compat").install()
        return
    orbax_module = importlib.import_module("orbax.checkpoint.transform_utils")
    ours = importlib.import_module("flax_ckpt_compat.transforms")
    for name in OF_ORBAX:
        setattr(orbax_module, name, _counted(f"ours.{name}", getattr(ours, name)))
    # The class itself stays what it is, for isinstance and for dataclasses.fields.
    ours.Transform.__post_init__ = _counted("ours.Transform", ours.Transform.__post_init__)
    for name in ("Transform", "RestoreTransform"):
        setattr(orbax_module, name, getattr(ours, name))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the refusals with the flag on, found by their parameters and not by their number."""
    refusing = [item for item in items if _pins_a_refusal(item)]
    deselected.extend(item.name for item in refusing)
    config.hook.pytest_deselected(items=refusing)
    items[:] = [item for item in items if item not in refusing]


def _pins_a_refusal(item: pytest.Item) -> bool:
    # absl numbers the cases of a test and keeps their parameters as text in this table.
    parameters = getattr(getattr(item, "cls", None), "_test_params_reprs", {}).get(item.name, "")
    return item.name.rstrip("0123456789") in REFUSALS and "use_orbax=True" in parameters


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the counts and what was left out."""
    with open(os.environ[COUNTS], "w", encoding="utf-8") as file:
        json.dump({"calls": counts, "deselected": sorted(deselected)}, file)
