"""The migrations of the guide run as written, and the suggestion finds the rules of the first ten by itself."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreters import start_python
from tests.support.peers import version

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "migration_guide" / "recipes").glob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VERDICT = """
from tests.support.verdicts import write_verdict

write_verdict("verdict.json", path, target, restored)
"""
# The NNX of older releases has other optimizers.
QUICK = ("02-renamed-module",)
NEEDS_FLAX = {"07-linen-to-nnx": (0, 11), "17-nnx-of-older-releases": (0, 12), "21-t5x": (0, 11)}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a page did.

    Attributes:
        failed: the error of the program, empty where it ran through.
        printed: what it printed, with ``/…`` for the folder that it ran in.
        verdict: what `write_verdict` wrote.
    """

    failed: str
    printed: str
    verdict: dict[str, Any]

    @property
    def right(self) -> bool:
        """True where the suggestion, or none where none is needed, restores what the page restores."""
        return self.verdict["difference"] is None


def fences(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return [match[2] for match in FENCE.finditer(page.read_text(encoding="utf-8")) if match[1] == language]


def run(page: Path, folder: Path) -> Outcome:
    """Runs a page in a fresh interpreter and an empty folder, and asks for a suggestion at its end."""
    folder.mkdir()
    program = start_python("\n".join([*fences(page, "python"), VERDICT]), cwd=folder)
    out, err = program.communicate(timeout=120)
    printed = out.replace(str(folder.resolve()), "/…")
    if program.returncode:
        return Outcome(err, printed, {"suggested": None, "confident": False, "difference": "the page failed"})
    return Outcome("", printed, json.loads((folder / "verdict.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def outcome_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Outcome]:
    """What a page does; every page runs once."""
    folder = tmp_path_factory.mktemp("recipes")
    return functools.cache(lambda page: run(page, folder / page.stem))


def skip_if_unable(page: Path) -> None:
    """Skip a page that this Flax cannot run."""
    if not can_run(page):
        pytest.skip("this Flax has another nnx.Optimizer")


def can_run(page: Path) -> bool:
    """Whether the installed Flax has what the page needs."""
    return version("flax") >= NEEDS_FLAX.get(page.stem, ())


# Each page trains a model; by default one does.
AS_PARAMETERS = [
    pytest.param(page, id=page.stem, marks=() if page.stem in QUICK else pytest.mark.slow) for page in PAGES
]


@pytest.mark.parametrize("page", AS_PARAMETERS)
def test_page_runs(page: Path, outcome_of: Callable[[Path], Outcome]) -> None:
    """A migration trains, saves, restores into the new state and proves that outputs and moments are right."""
    skip_if_unable(page)
    assert not outcome_of(page).failed


@pytest.mark.parametrize("page", AS_PARAMETERS)
def test_page_shows_what_it_prints(page: Path, outcome_of: Callable[[Path], Outcome]) -> None:
    """The tables on a page are what its program prints, line by line, but for what three dots stand for."""
    skip_if_unable(page)
    printed = iter(outcome_of(page).printed.splitlines())
    for shown in fences(page, "text"):
        for line in shown.splitlines():
            whole, cut, _ = line.partition("…")
            if cut and line.endswith(" …"):
                assert any(there.startswith(whole) for there in printed), line
            else:
                assert line in printed, line


@pytest.mark.slow
def test_suggestions_are_right(outcome_of: Callable[[Path], Outcome]) -> None:
    """With the rules withheld, the suggestion is right bit by bit for all but two of ten, nowhere sure and wrong."""
    outcomes = {page.stem: outcome_of(page) for page in PAGES if can_run(page)}
    verdicts = {name: outcome.verdict for name, outcome in outcomes.items()}
    # Of two checkpoints into one, a suggestion knows the first, and what the second holds stays as the target has it.
    of_one = {name: one for name, one in verdicts.items() if name != "16-two-checkpoints-into-one"}
    sure_and_wrong = {name: one for name, one in of_one.items() if one["confident"] and one["difference"]}
    assert not sure_and_wrong
    wrong = {name: one.verdict for name, one in outcomes.items() if name < "11" and not one.right}
    assert len(wrong) <= 2, wrong


def test_table_has_the_rules_of_the_pages() -> None:
    """Each call in the table of all recipes is one of the page that its row links to."""
    guide = ROOT / "migration_guide"
    table = (guide / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.+\]\(([^#)]+).*?\) \| (.*) \|$", table, re.MULTILINE)
    assert {guide / page for page, _ in rows} == set(PAGES)
    for page, cell in rows:
        text = "".join((guide / page).read_text(encoding="utf-8").split())
        for call in re.findall("`(.+?)`", cell):
            assert "".join(f"rules.{call}".replace("\\|", "|").split()).removesuffix("{…})") in text, call


def test_both_formats() -> None:
    """Of the first ten, half are on each side of Flax's flag; all others restore from both formats."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum('"flax_use_orbax_checkpointing", True' in text for text in texts[:10]) == 5
    assert all('("msgpack", "orbax")' in text for text in texts[10:])
