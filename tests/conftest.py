"""Fixtures for every room of the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import flax
import pytest
from flax.training import checkpoints as flax_checkpoints
from hypothesis import HealthCheck, settings

from flax_ckpt_compat import checkpoints
from tests.support.saves import Save, use_flag

# A busy machine is no reason for a test to fail.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(params=[False, True], ids=["msgpack", "orbax"])
def flag(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Each test once with Flax's flag off and once with it on; the flag as it was afterwards."""
    before: Any = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", request.param)
    yield request.param
    flax.config.update("flax_use_orbax_checkpointing", before)


@pytest.fixture(params=["ours", "flax"])
def save(request: pytest.FixtureRequest) -> Save:
    """Our save_checkpoint and real Flax's."""
    writers = {"ours": checkpoints.save_checkpoint, "flax": flax_checkpoints.save_checkpoint}

    def quiet(*args: Any, **kwargs: Any) -> str:
        with use_flag(flax.config.flax_use_orbax_checkpointing):
            return writers[request.param](*args, **kwargs)

    return quiet


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table of who reads what of whom, if its tests ran."""
    report = sys.modules.get("tests.support.interop_report")
    if report is not None and report.OUTCOMES:
        terminalreporter.section("interop")
        for line in report.lines():
            terminalreporter.write_line(line)
