"""What ran, of what was planned: a run whose time is over says so, is a sample of the whole row, and can go on."""

from __future__ import annotations

import itertools
import json
import logging
import tempfile
import types
from pathlib import Path

import pytest

from tests.reliability import __main__ as command
from tests.reliability import experiments, extent, page
from tests.reliability.extent import Extent
from tests.reliability.tally import Tally
from tests.reliability.workloads import SYSTEMS, System

OURS = SYSTEMS[0]
SCENARIOS = ("first", "second", "third")


def _row(length: Extent, tally: Tally, count: int = 40) -> list[tuple[str, int]]:
    """Run a row of three scenarios, one case after the other."""
    ran = []
    batches = [(scenario, [case]) for scenario in SCENARIOS for case in range(count)]
    for scenario, [case] in length.through(batches, tally):
        ran.append((scenario, case))
        tally.add("", scenario)
    return ran


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second whenever it is read."""
    ticking = types.SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr(extent, "time", ticking)
    monkeypatch.setattr(command, "time", ticking)


@pytest.mark.usefixtures("clock")
def test_a_row_that_is_cut_short_is_a_sample_of_the_whole() -> None:
    """Its tally holds how many were planned, and each scenario has about its share."""
    tally = Tally()
    ran = _row(Extent(until=30), tally)
    assert (len(ran), tally.planned) == (31, 120)
    assert len(set(ran)) == 31
    # Of 31 of 120 cases, one scenario of three has fewer than 4 or more than 17 with a probability below 1 %.
    assert all(4 <= sum(found == scenario for found, _ in ran) <= 17 for scenario in SCENARIOS)


@pytest.mark.usefixtures("clock")
def test_a_row_that_was_cut_short_goes_on() -> None:
    """Each case runs once, whichever way the row was cut."""
    tally = Tally()
    ran = [_row(Extent(until=until), tally) for until in (30, 60, 10**6)]
    assert list(map(bool, ran)) == [True, True, True]
    assert len({case for part in ran for case in part}) == sum(map(len, ran)) == tally.counts.total() == 120
    assert _row(Extent(), tally) == []


def test_another_plan_begins_anew() -> None:
    """Another count of calls, or another scale, is another order of cases."""
    tally = Tally(planned=120)
    tally.add("", "of another plan", 100)
    assert len(_row(Extent(), tally, count=41)) == tally.counts.total() == tally.planned == 123


@pytest.mark.usefixtures("clock")
def test_the_page_says_how_many_were_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first command to the last: both numbers where the time was over, one where all ran."""

    def run(_: System, tally: Tally, length: Extent) -> None:
        _row(length, tally)

    def reader(_: System, tally: Tally, __: Extent) -> None:
        tally.add("", "a restore", 7)

    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)  # as the command sets it
    monkeypatch.setattr(logging, "disable", lambda _: None)
    monkeypatch.setattr(command.shim, "is_loaded", lambda: True)
    monkeypatch.setattr(experiments, "WITH_SHIM", ())
    rows = (("calls", "a call", run), ("reader", "a reader", reader))
    monkeypatch.setattr(experiments, "EXPERIMENTS", tuple(experiments.Experiment(*row, (OURS,)) for row in rows))
    monkeypatch.setattr(page, "DATA", tmp_path / "results.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.DATA.write_text("[]")
    page.PAGE.write_text(f"before\n{page._BEGIN}\n{page._END}\nafter\n")

    def cells(*arguments: str) -> list[list[str]]:
        assert command.main(["--write", *arguments]) == 0
        return [line.split(" | ") for line in page.PAGE.read_text().splitlines() if line.startswith("| a ")]

    calls, read = cells("--seconds", "30")
    held = json.loads(page.DATA.read_text())[0]["cells"][OURS.name]
    ran = held["counts"][""]
    assert 0 < ran < 120 == held["planned"]
    assert (calls[1], read[1]) == (f"0 of {ran}, 120 planned", "0 of 7")
    calls, read = cells("--continue")
    assert (calls[1], read[1]) == ("0 of 120", "0 of 7")


@pytest.mark.parametrize("is_promised", [True, False])
def test_the_command_fails_where_a_promise_is_broken(is_promised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of what is known to go wrong is shown, and does not count."""

    def run(_: System, tally: Tally, __: Extent) -> None:
        tally.add("lost: a checkpoint", "a case")

    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)
    monkeypatch.setattr(logging, "disable", lambda _: None)
    monkeypatch.setattr(command.shim, "is_loaded", lambda: True)
    monkeypatch.setattr(experiments, "WITH_SHIM", ())
    row = experiments.Experiment("late", "late", run, (OURS,), is_promised)
    monkeypatch.setattr(experiments, "EXPERIMENTS", (row,))
    assert command.main(["--scale", "1"]) == is_promised
