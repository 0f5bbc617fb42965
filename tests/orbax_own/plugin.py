"""A pytest plugin (``-p tests.orbax_own.plugin``): Orbax's own tests of its transformations run on ours.

It puts ours into Orbax's module before anything is collected, and counts the calls that reach them.
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
COUNTS_VARIABLE = "ORBAX_OWN_COUNTS"
FUNCTIONS = ("apply_transformations", "merge_trees", "intersect_trees")

counts: Counter[str] = Counter()


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def count(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return count


def pytest_configure(config: pytest.Config) -> None:
    """Puts our functions and classes, with counters around them, into Orbax's module."""
    orbax_module = importlib.import_module("orbax.checkpoint.transform_utils")
    ours = importlib.import_module("flax_ckpt_compat.transforms")
    for name in FUNCTIONS:
        setattr(orbax_module, name, _counted(name, getattr(ours, name)))
    # The class itself stays what it is, for isinstance and for dataclasses.fields.
    ours.Transform.__post_init__ = _counted("Transform", ours.Transform.__post_init__)
    for name in ("Transform", "RestoreTransform"):
        setattr(orbax_module, name, getattr(ours, name))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the counts."""
    path = os.environ.get(COUNTS_VARIABLE)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(counts, file)
