"""The corpus: its verdicts are what happens when its programs run, and scan gives these verdicts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scan.corpus import SETS, expected, found, is_change, measure, programs
from tests.scan.running import main_file
from tests.support.interpreters import run_python

ALL = [program for which in SETS for program in programs(which)]
# What scan does not find, or finds where nothing is: the figures of the guide count them.
KNOWN_GAPS = {"mmap_header"}


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Any]]:
    """What each program printed, and the lines that an error came through, by flag."""
    runnable = [program for program in ALL if main_file(program)]
    out, _ = run_python("import sys; from tests.scan.running import run_all; run_all(sys.argv[1:])", *runnable)
    yield json.loads(out)


@pytest.mark.parametrize("program", [one for one in ALL if main_file(one)], ids=lambda one: one.name)
def test_verdicts_are_true(program: Path, runs: dict[str, Any]) -> None:
    """A program with a line to change does something else once the flag is flipped, and others do the same.

    An error comes through one of the lines that have a verdict."""
    off, on = runs[str(program)]["False"], runs[str(program)]["True"]
    verdicts = expected(program)
    assert not off["error"]
    assert (off != on) == any(map(is_change, verdicts)), (off, on)
    if on["error"]:
        assert {tuple(place) for place in on["lines"]} & {(file, line) for file, line, _ in verdicts}


@pytest.mark.parametrize("program", ALL, ids=lambda one: one.name)
def test_scan_gives_the_verdicts(program: Path, request: pytest.FixtureRequest) -> None:
    """At their lines, and no others."""
    if program.name in KNOWN_GAPS:
        request.applymarker(pytest.mark.xfail(reason="counted in the figures of the guide", strict=True))
    assert sorted(found(program)) == sorted(expected(program))


@pytest.mark.parametrize("which", SETS)
def test_figures_are_those_of_the_guide(which: str) -> None:
    """Precision and recall of each set are in its table."""
    guide = Path(__file__).parents[2] / "migration_guide" / "moving.md"
    assert f"| {measure(which, lambda _: None)} |" in guide.read_text()
