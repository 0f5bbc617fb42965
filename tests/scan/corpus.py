"""Programs with known verdicts, in the styles of public JAX projects, and how much of these scan finds.

Comments tell the lines that a finding belongs to (``# expect: remove``). Run this module to measure scan:

    python -m tests.scan.corpus
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from flax_ckpt_compat._scan.findings import CHANGE, CHECK, KINDS
from flax_ckpt_compat._scan.project import scan

ROOT = Path(__file__).parent / "programs" / "corpus"
Verdict = tuple[str, int, str]  # file, line, kind
# What a program asks its reader for; all other findings are uses of the API, and need nothing.
_ASKS = {kind: about.action for kind, about in KINDS.items() if about.action in (CHANGE, CHECK) and kind != "flag"}


def planted(file: Path) -> list[tuple[int, str]]:
    """Return the kinds that comments of a program announce, by line."""
    return [
        (number, kind)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for kind in (re.findall(r"[\w-]+", line.partition("# expect:")[2]))
    ]


def programs() -> list[Path]:
    """Return the folders of the programs, each a project of its own."""
    return sorted(folder for folder in ROOT.iterdir() if folder.is_dir())


def expected(program: Path) -> set[Verdict]:
    """Return the verdicts of a program's comments."""
    files = sorted(program.rglob("*.py"))
    return {(str(file.relative_to(program)), *one) for file in files for one in planted(file)}


def found(program: Path) -> set[Verdict]:
    """Return what scan asks for."""
    return {
        (str(Path(one.path).relative_to(program)), one.line, one.kind)
        for one in scan([program]).findings
        if one.kind in _ASKS
    }


def is_change(verdict: Verdict) -> bool:
    """Return whether a verdict is that something breaks."""
    return KINDS[verdict[2]].action == CHANGE if verdict[2] in KINDS else True


@dataclass
class Figures:
    """What scan found of the verdicts of one kind."""

    right: int = 0
    missed: int = 0
    wrong: int = 0

    def add(self, wanted: set[Verdict], given: set[Verdict]) -> None:
        """Count a program's verdicts."""
        self.right += len(wanted & given)
        self.missed += len(wanted - given)
        self.wrong += len(given - wanted)

    def __str__(self) -> str:
        given, wanted = self.right + self.wrong, self.right + self.missed
        return (
            f"precision {self.right / max(1, given):.0%} ({self.right}/{given}), "
            f"recall {self.right / max(1, wanted):.0%} ({self.right}/{wanted})"
        )


def measure(tell: Callable[[str], None]) -> str:
    """Return the figures of all programs, and tell each verdict that scan has missed or made up."""
    changes, looks = Figures(), Figures()
    broken = clear = alarms = 0
    for program in programs():
        wanted, given = expected(program), found(program)
        changes.add(set(filter(is_change, wanted)), set(filter(is_change, given)))
        looks.add({one for one in wanted if not is_change(one)}, {one for one in given if not is_change(one)})
        for mark, verdicts in (("missed", wanted - given), ("wrong", given - wanted)):
            for file, line, kind in sorted(verdicts):
                tell(f"{mark}: {program.name}/{file}:{line} {kind}")
        breaks, told = (any(map(is_change, verdicts)) for verdicts in (wanted, given))
        broken += breaks
        clear += breaks and not told
        alarms += told and not breaks
    count = len(programs())
    return (
        f"lines to change: {changes}; lines to look at: {looks}; "
        f"{clear} of {broken} breaking programs reported clean, "
        f"{alarms} of {count - broken} others reported as breaking"
    )


if __name__ == "__main__":
    click.echo(f"{len(programs())} programs: {measure(click.echo)}")
