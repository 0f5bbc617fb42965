"""The table of outcomes: printed, kept as results.json, and written into the guide."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import time
from pathlib import Path

from tests.reliability.tally import GOOD, Tally

DATA = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "migration_guide" / "reliability.md"
_BEGIN, _END = "<!-- table: python -m tests.reliability --write -->", "<!-- end of the table -->"
_COLUMNS = ("ours, msgpack", "ours, Orbax's format", "Flax, flag off", "Flax, flag on")


@dataclasses.dataclass(frozen=True)
class Row:
    """One experiment's outcomes.

    Attributes:
        name, title: of the experiment.
        counts: system → outcome → how often.
        scale: part of the long form.
        seconds: it took.
        date: of the run.
        versions: of what ran.
    """

    name: str
    title: str
    counts: dict[str, dict[str, int]]
    scale: float
    seconds: float
    date: str
    versions: str

    @property
    def failed(self) -> bool:
        """Whether ours did something wrong."""
        return any(
            outcome not in GOOD
            for system, counts in self.counts.items()
            if system.startswith("ours")
            for outcome in counts
        )

    def cells(self) -> list[str]:
        """Return the text of each column."""
        return [_cell(self.counts.get(column)) for column in _COLUMNS]


def _cell(counts: dict[str, int] | None) -> str:
    if not counts:
        return "-"
    total, wrong = sum(counts.values()), sum(times for outcome, times in counts.items() if outcome not in GOOD)
    kinds = ", ".join(f"{outcome} {times:,}" for outcome, times in sorted(counts.items()) if outcome)
    return f"{f'**{wrong:,}**' if wrong else '0'} of {total:,}" + (f" ({kinds})" if kinds else "")


def row(name: str, tally: Tally, scale: float, seconds: float) -> Row:
    """Return the row of a finished experiment."""
    versions = ", ".join(f"{one} {importlib.metadata.version(one)}" for one in ("flax", "orbax-checkpoint", "jax"))
    counts = {system: dict(outcomes) for system, outcomes in tally.counts.items()}
    return Row(name, tally.name, counts, scale, round(seconds, 1), time.strftime("%Y-%m-%d", time.gmtime()), versions)


def show(one: Row) -> None:
    """Print a row."""
    print(f"{one.title} (scale {one.scale:g}, {one.seconds:.0f} s)")
    for column, cell in zip(_COLUMNS, one.cells(), strict=True):
        print(f"  {column:<22}{cell.replace('*', '')}", flush=True)


def write(rows: list[Row]) -> None:
    """Keep the rows, and write the table of all that are kept into the guide."""
    kept = {one["name"]: one for one in json.loads(DATA.read_text(encoding="utf-8"))} if DATA.exists() else {}
    kept.update({one.name: dataclasses.asdict(one) for one in rows})
    from tests.reliability.experiments import EXPERIMENTS

    ordered = [kept[one.name] for one in EXPERIMENTS if one.name in kept]
    DATA.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(f"{before}{_BEGIN}\n{_table([Row(**one) for one in ordered])}{_END}{after}", encoding="utf-8")


def _table(rows: list[Row]) -> str:
    lines = ["| what was injected | " + " | ".join(_COLUMNS) + " | scale |", "|---" * (len(_COLUMNS) + 2) + "|"]
    lines += [f"| {one.title} | " + " | ".join(one.cells()) + f" | {one.scale:g} |" for one in rows]
    ran = sorted({f"{one.date} with {one.versions}" for one in rows})
    return "\n".join(lines) + "\n\nRun on " + "; ".join(ran) + ".\n"
