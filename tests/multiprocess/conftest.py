"""Fixtures for tests with teams of processes."""

from __future__ import annotations

import jax
import pytest

# As in the processes of a team, whose random keys are compared with this one's; jax's default since 0.5.
jax.config.update("jax_threefry_partitionable", True)


@pytest.fixture(params=[False, True], ids=["msgpack", "orbax"])
def orbax(request: pytest.FixtureRequest) -> bool:
    """What Flax's flag shall be in the processes of a team."""
    return bool(request.param)
