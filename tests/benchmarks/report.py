"""Figures as tables, for people and for RESULTS.md."""

import dataclasses
import statistics
import sys

from tests.benchmarks import lineup
from tests.benchmarks.series import Entry, Series
from tests.benchmarks.systems import BLOCKED, COLD, COPY, OTHER_MESH, OURS, RAW, RESTORE, RESTORE_NONE, SAVE, TOUCHED
from tests.benchmarks.workloads import Workload

OPERATIONS = (SAVE, RESTORE, OTHER_MESH, RESTORE_NONE, COLD, TOUCHED, BLOCKED)
_COPY_ROW = "raw: one copy in memory"


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, column names, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        """The table for RESULTS.md."""
        lines = [self.columns, ("---",) + ("---:",) * (len(self.columns) - 1), *self.rows]
        return "\n".join([f"### {self.title}", "", *("| " + " | ".join(cells) + " |" for cells in lines)])

    def show(self) -> None:
        """Prints it: in colour on a terminal, as plain aligned text into a pipe."""
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable

        terminal = sys.stdout.isatty()
        console = Console(width=None if terminal else 200, highlight=False)
        console.print(f"\n{self.title}", style="bold")
        table = RichTable(box=box.SIMPLE_HEAD if terminal else None)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=not terminal)
        for row in self.rows:
            table.add_row(*row, style="bold" if row[0].startswith("ours") else None)
        console.print(table)


def tables(workload: Workload, series: Series) -> list[Table]:
    """One table for each operation on a workload, and one that compares the two positions of the flag."""
    columns = ("system", "median s", "min to max s", "peer ÷ ours", "÷ limit", "synced")
    made = []
    for operation in OPERATIONS:
        rows = [_row(figures) for figures in _all_figures(workload, series, operation)]
        if rows:
            rows += [_copy_row(series)] if operation == BLOCKED else []
            shown = columns if operation == SAVE else columns[:-1]
            title = f"{workload.name}, {operation} ({workload.summary})"
            made.append(Table(title, shown, [row[: len(shown)] for row in rows]))
    flag = _flag_rows(series)
    return [*made, Table(f"{workload.name}, flag on ÷ flag off (ours)", ("operation", "ratio"), flag)] if flag else made


def memory_table(peaks: list[Entry]) -> Table:
    """Peak memory above the live tree, or above the result of a restore."""
    rows = []
    for entry in peaks:
        peak = entry["bytes"]
        shown = "unknown" if peak is None else str(round(peak / 2**20))
        rows.append((f"{entry['workload']}, {entry['operation']}, {entry['system']}", shown))
    return Table("Peak memory above the live tree", ("what", "MiB"), rows)


@dataclasses.dataclass(frozen=True)
class _Figures:
    """One row of a table: what a system took, beside its fastest peer and the machine's limit.

    Attributes:
        system: its name.
        seconds: of each round.
        peer: how many times faster than the fastest peer, and that one's name.
        limit: seconds that the machine's own limit took.
        unsynced: bytes that a save left in memory only; None if unknown.
    """

    system: str
    seconds: list[float]
    peer: tuple[float, str] | None
    limit: float | None
    unsynced: int | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def beside_peer(self) -> str:
        return f"{self.peer[0]:.2f} ({self.peer[1]})" if self.peer else ""

    @property
    def beside_limit(self) -> str:
        return f"{self.median / self.limit:.2f}" if self.limit else ""


def _all_figures(workload: Workload, series: Series, operation: str) -> list[_Figures]:
    names = [one.name for one in (*lineup.SYSTEMS[workload.name], *lineup.BACKGROUND.get(workload.name, ()))]
    systems = [name for name in dict.fromkeys(names) if (name, operation) in series.seconds]
    return [_figures(series, operation, system) for system in systems]


def _figures(series: Series, operation: str, system: str) -> _Figures:
    raw = {BLOCKED: COPY, SAVE: SAVE, COLD: COLD}.get(operation, RESTORE)
    return _Figures(
        system,
        series.seconds[system, operation],
        _beside_peer(series, operation, system),
        series.raw(raw),
        series.unsynced.get(system),
    )


def _beside_peer(series: Series, operation: str, system: str) -> tuple[float, str] | None:
    found = series.fastest(lineup.peers_of(system, operation), operation)
    ratio = series.ratio(operation, found[1], system) if found else None
    return (ratio, found[1]) if found and ratio is not None else None


def _row(one: _Figures) -> tuple[str, ...]:
    measured = (_seconds(one.median), _spread(one.seconds))
    return (one.system, *measured, one.beside_peer, one.beside_limit, _synced(one.unsynced))


def _copy_row(series: Series) -> tuple[str, ...]:
    seconds = series.seconds[RAW[0].name, COPY]
    return (_COPY_ROW, _seconds(statistics.median(seconds)), _spread(seconds), "", "1.00", "")


def _flag_rows(series: Series) -> list[tuple[str, ...]]:
    off, on = (system.name for system in OURS)
    ratios = [(operation, series.ratio(operation, on, off)) for operation in (SAVE, RESTORE)]
    return [(operation, f"{ratio:.2f}") for operation, ratio in ratios if ratio]


def _synced(dirty: int | None) -> str:
    if dirty is None:
        return "unknown"
    return "yes" if dirty == 0 else f"no, {dirty / 1e6:{'.0f' if dirty > 1e8 else '.3g'}} MB only in memory"


def _spread(seconds: list[float]) -> str:
    return f"{_seconds(min(seconds))} to {_seconds(max(seconds))}"


def _seconds(value: float) -> str:
    return f"{value:.2g}" if value < 0.01 else f"{value:.3f}" if value < 10 else f"{value:.1f}"
