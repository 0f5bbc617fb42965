"""The newest parts of real Flax and real Orbax; a test that uses what the installed release lacks is skipped."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import pytest


class _Missing:
    """Stands for a module; any use of it skips the test that uses it."""

    def __init__(self, why: str):
        self._why = why

    def __getattr__(self, name: str) -> Any:
        pytest.skip(self._why)


def version(distribution: str) -> tuple[int, ...]:
    """The installed release of a package, as numbers."""
    return tuple(int(part) for part in importlib.metadata.version(distribution).split(".")[:3])


def _module(name: str, distribution: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return _Missing(f"{distribution} {importlib.metadata.version(distribution)} has no {name}")


ocp_v1 = _module("orbax.checkpoint.experimental.v1", "orbax-checkpoint")
nnx = _module("flax.nnx", "flax")
