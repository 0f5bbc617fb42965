"""Figures as tables, for people and for RESULTS.md."""

import dataclasses
import statistics
import sys

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from tests.benchmarks import goals
from tests.benchmarks.rounds import Series
from tests.benchmarks.systems import BLOCKED, COPY, RAW, RESTORE, RESTORE_NONE, SAVE, SYSTEMS, peer_of
from tests.benchmarks.workloads import Workload

_OURS = [system.name for system in SYSTEMS if system.ours]
_ALL = [system.name for system in (*SYSTEMS, *RAW)]


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
        terminal = sys.stdout.isatty()
        console = Console(width=None if terminal else 200, highlight=False)
        console.print(f"\n{self.title}", style="bold")
        table = RichTable(box=box.SIMPLE_HEAD if terminal else None)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=not terminal)
        for row in self.rows:
            table.add_row(*row, style="bold" if row[0] in _OURS else None)
        console.print(table)


def tables(workload: Workload, series: Series) -> list[Table]:
    """One table for each operation on a workload, and one that compares the two positions of the flag."""
    columns = ("system", "median s", "min to max s", "peer ÷ ours", "ours ÷ raw", "goal", "later goal", "synced")
    made = []
    for operation in (SAVE, RESTORE, RESTORE_NONE, BLOCKED):
        rows = [_row(workload, series, system, operation) for system in _ALL if (system, operation) in series.seconds]
        if rows:
            rows += _copy_row(series) if operation == BLOCKED else []
            shown = columns if operation == SAVE else columns[:-1]
            title = f"{workload.name}, {operation} ({workload.summary})"
            made.append(Table(title, shown, [row[: len(shown)] for row in rows]))
    return [*made, _flag_table(workload, series)]


def memory_table(peaks: dict[tuple[str, str, str], int | None]) -> Table:
    """Peak memory above the live tree: (workload, system, operation) → bytes."""
    rows = []
    for (workload, system, operation), peak in peaks.items():
        goal = goals.MEMORY if system in _OURS else ""
        rows.append((f"{workload}, {operation}, {system}", "unknown" if peak is None else f"{peak / 2**20:.0f}", goal))
    return Table("Peak memory above the live tree", ("what", "MiB", "later goal"), rows)


def _row(workload: Workload, series: Series, system: str, operation: str) -> tuple[str, ...]:
    seconds = series.seconds[system, operation]
    ours = statistics.median(seconds)
    peer = series.median(peer_of(system), operation) if system in _OURS else None
    least = series.median(RAW[0].name, COPY) if operation == BLOCKED else series.raw(_raw_operation(operation))
    first, later = goals.GOALS.get((workload.kind, operation, system), ("", ""))
    ratios = (f"{peer / ours:.2f}" if peer else "", f"{ours / least:.2f}" if least else "")
    spread = f"{_seconds(min(seconds))} to {_seconds(max(seconds))}"
    return (system, _seconds(ours), spread, *ratios, first, later, _synced(series, system))


def _raw_operation(operation: str) -> str:
    return SAVE if operation == SAVE else RESTORE


def _copy_row(series: Series) -> list[tuple[str, ...]]:
    seconds = series.seconds[RAW[0].name, COPY]
    spread = f"{_seconds(min(seconds))} to {_seconds(max(seconds))}"
    return [("raw: one copy in memory", _seconds(statistics.median(seconds)), spread, "", "1.00", "", "", "")]


def _flag_table(workload: Workload, series: Series) -> Table:
    rows = []
    for operation in (SAVE, RESTORE):
        off, on = (series.median(system, operation) for system in _OURS)
        if off and on:
            rows.append((operation, f"{on / off:.2f}", goals.FLAG[workload.kind]))
    return Table(f"{workload.name}, flag on ÷ flag off (ours)", ("operation", "ratio", "later goal"), rows)


def _synced(series: Series, system: str) -> str:
    dirty = series.unsynced.get(system)
    if dirty is None:
        return "unknown"
    return "yes" if dirty == 0 else f"no, {dirty / 1e6:.3g} MB only in memory"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
