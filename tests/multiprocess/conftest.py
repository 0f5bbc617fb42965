"""Fixtures for tests with teams of processes."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["msgpack", "orbax"])
def orbax(request: pytest.FixtureRequest) -> bool:
    """What Flax's flag shall be in the processes of a team."""
    return bool(request.param)
