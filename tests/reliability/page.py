"""The table of outcomes: printed, kept as results.json, and written into the guide."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

from tests.reliability.tally import GOOD, Tally

DATA = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "migration_guide" / "reliability.md"
_BEGIN, _END = "<!-- table: python -m tests.reliability --write -->", "<!-- end of the table -->"
_COLUMNS = ("ours, msgpack", "ours, Orbax's format", "Flax, flag off", "Flax, flag on")
_SIDES = (_COLUMNS[:2], _COLUMNS[2:])


@dataclasses.dataclass(frozen=True)
class Cell:
    """One system's outcomes in one experiment.

    Attributes:
        counts: outcome → how often.
        scale: part of the long form that was planned.
        seconds: it took.
        date: of the run.
        versions: of what ran.
        planned: cases, whether they ran or not; None where they are not counted beforehand.
    """

    counts: dict[str, int]
    scale: float
    seconds: float
    date: str
    versions: str
    planned: int | None = None

    @property
    def wrong(self) -> int:
        """In how many cases something was wrong."""
        return sum(times for outcome, times in self.counts.items() if outcome not in GOOD)

    def __str__(self) -> str:
        total = sum(self.counts.values())
        short = f", {self.planned:,} planned" if self.planned and self.planned > total else ""
        kinds = ", ".join(f"{outcome} {times:,}" for outcome, times in sorted(self.counts.items()) if outcome)
        return f"{f'**{self.wrong:,}**' if self.wrong else '0'} of {total:,}{short}" + (f" ({kinds})" if kinds else "")


@dataclasses.dataclass(frozen=True)
class Row:
    """One experiment's outcomes.

    Attributes:
        name, title: of the experiment.
        cells: by the name of the system.
    """

    name: str
    title: str
    cells: dict[str, Cell]

    @property
    def failed(self) -> bool:
        """Whether ours did something wrong."""
        return any(cell.wrong for system, cell in self.cells.items() if system.startswith("ours"))

    def scales(self) -> str:
        """Return the part of the long form: one number, or ours / Flax's."""
        parts = [{f"{self.cells[name].scale:g}" for name in names if name in self.cells} for names in _SIDES]
        return " / ".join(dict.fromkeys(", ".join(sorted(part)) for part in parts if part))


def cell(tally: Tally, scale: float, seconds: float) -> Cell:
    """Return the cell of an experiment that has ended, or whose time is over."""
    versions = ", ".join(f"{one} {importlib.metadata.version(one)}" for one in ("flax", "orbax-checkpoint", "jax"))
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return Cell(dict(tally.counts), scale, round(seconds, 1), date, versions, tally.planned)


def show(system: str, cell: Cell) -> None:
    """Print a cell."""
    print(f"  {system:<22}{str(cell).replace('*', '')}; scale {cell.scale:g}, {cell.seconds:.0f} s", flush=True)


def write(row: Row) -> None:
    """Keep the cells of a row, and write the table of all that are kept into the guide."""
    from tests.reliability.experiments import EXPERIMENTS

    with open(DATA, encoding="utf-8") as lock:  # two runs may write
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = {one.name: one for one in map(_row, json.loads(DATA.read_text(encoding="utf-8")))}
        kept[row.name] = Row(row.name, row.title, {**(kept[row.name].cells if row.name in kept else {}), **row.cells})
        rows = [kept[one.name] for one in EXPERIMENTS if one.name in kept]
        DATA.write_text(json.dumps([dataclasses.asdict(one) for one in rows], indent=1) + "\n", encoding="utf-8")
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        PAGE.write_text(f"{before}{_BEGIN}\n{_table(rows)}{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def kept(name: str, system: str) -> Cell | None:
    """Return the cell of an experiment and a system that `write` has kept."""
    rows = map(_row, json.loads(DATA.read_text(encoding="utf-8")))
    return next((row.cells.get(system) for row in rows if row.name == name), None)


def _row(stored: dict[str, Any]) -> Row:
    return Row(stored["name"], stored["title"], {name: Cell(**held) for name, held in stored["cells"].items()})


def _table(rows: list[Row]) -> str:
    lines = ["| what was injected | " + " | ".join(_COLUMNS) + " | scale |", "|---" * (len(_COLUMNS) + 2) + "|"]
    for row in rows:
        cells = [str(row.cells.get(column, "-")) for column in _COLUMNS]
        lines.append(f"| {row.title} | {' | '.join(cells)} | {row.scales()} |")
    ran = sorted({f"{held.date} with {held.versions}" for row in rows for held in row.cells.values()})
    return "\n".join(lines) + "\n\nRun on " + "; ".join(ran) + ".\n"
