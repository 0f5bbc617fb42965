"""The corpus: its verdicts are what happens when its programs run, and scan gives these verdicts."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flax_ckpt_compat._scan.project import scan
from tests.scan.corpus import expected, found, is_change, measure, programs
from tests.scan.running import main_file
from tests.support.interpreters import run_python

ALL = programs()
RUNNABLE = [program for program in ALL if main_file(program)]
# What scan does not find, or finds where nothing is: the figures of the guide count them.
KNOWN_GAPS = {"ls_by_subprocess", "mmap_header"}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What each program that is asked for printed, and the lines that an error came through, by flag."""
    own = [item for item in request.session.items if item.path == request.path]
    items = [item for item in own if "runs" in getattr(item, "fixturenames", ())]
    wanted = {item.callspec.params["program"] for item in items}  # type: ignore[attr-defined]
    runnable = [program for program in RUNNABLE if program in wanted]
    out, _ = run_python("import sys; from tests.scan.running import run_all; run_all(sys.argv[1:])", *runnable)
    yield json.loads(out)


@pytest.mark.parametrize(
    "program",
    [pytest.param(one, marks=[pytest.mark.slow] * bool(at % 3)) for at, one in enumerate(RUNNABLE)],
    ids=lambda one: one.name,
)
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


def test_figures_are_those_of_the_guide() -> None:
    """Precision, recall and the number of programs."""
    guide = Path(__file__).parents[2] / "migration_guide" / "moving.md"
    assert f"On its {len(ALL)} programs: {measure(lambda _: None)}." in " ".join(guide.read_text().split())


@pytest.fixture(scope="module")
def fixed_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each program does after --fix, by its name and flag."""
    from flax_ckpt_compat._scan.fix import fix

    folder = tmp_path_factory.mktemp("fixed")
    for program in ALL:
        copy = folder / program.name
        shutil.copytree(program, copy, ignore=shutil.ignore_patterns("__pycache__"))
        findings = scan([copy]).findings
        for path in {one.path for one in findings}:
            code = Path(path).read_text()
            Path(path).write_text(fix(code, [one for one in findings if one.path == path]))
    runnable = [folder / program.name for program in ALL if main_file(program)]
    out, _ = run_python("import sys; from tests.scan.running import run_all; run_all(sys.argv[1:])", *runnable)
    return {Path(name).name: one for name, one in json.loads(out).items()}


@pytest.mark.slow
@pytest.mark.parametrize("program", [one for one in ALL if main_file(one)], ids=lambda one: one.name)
def test_fixed_programs_do_their_job(program: Path, runs: dict[str, Any], fixed_runs: dict[str, Any]) -> None:
    """On msgpack files what they did before; and with the flag on what they did before, or what they should."""
    before, after = runs[str(program)], fixed_runs[program.name]
    assert after["False"] == before["False"]
    if after["True"]["error"]:
        assert after["True"]["error"] == before["True"]["error"]
    else:
        assert after["True"]["out"] in (before["False"]["out"], before["True"]["out"])
