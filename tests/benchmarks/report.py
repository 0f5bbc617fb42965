"""The figures of results.json as tables: RESULTS.md for people, and the one in README.md.

``python -m tests.benchmarks.report`` writes both; a test fails where they show other figures.
"""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from tests.benchmarks import peers, rounds
from tests.benchmarks.rounds import Entry, Series
from tests.benchmarks.systems import FLAX, OURS, RAW, RESTORE, SAVE

# ``machine``, ``workloads`` (by name), ``seconds`` (see `Series.entries`) and ``losses``.
Results = dict[str, Any]
DATA, PAGE = Path(__file__).with_name("results.json"), Path(__file__).with_name("RESULTS.md")
README = Path(__file__).parents[2] / "README.md"
_BEGIN = "<!-- figures: written by `python -m tests.benchmarks.report` -->\n"
_END = "<!-- end of figures -->"
_README_ROWS = (
    ("0.5 GB (GPT-2 small)", "gpt2-jax"),
    ("1.5 GB (with Adam's state)", "gpt2+adamw"),
    ("5,000 arrays, 2.6 MB", "leaves-jax"),
)
_HEAD = """\
# Benchmark results

`python -m tests.benchmarks --rounds {rounds} --write`. All systems of a table ran in the same process and the same
rounds, in an order of each round's own. On the small leaves all ran {small} rounds, but Orbax's interfaces up to
{slow}. Each save went to a fresh directory, and every restored leaf was compared bit by bit.

- *peer ÷ ours*: msgpack beside Flax's msgpack; Orbax's format beside the fastest of Orbax's interfaces in that table
  (Flax with the flag on, `PyTreeCheckpointer`, `StandardCheckpointer`, Orbax v1), which is named.
- *÷ limit*: how many times the machine's own limit it took. That is the faster of one thread and of one for each CPU
  that write and sync, or read into fresh memory, the same bytes as one file.
- Ratios of systems that ran equally often are medians of the ratios within each round: the host of a virtual machine
  may slow down by half from one second to the next. All other ratios are those of medians.
- *synced*: what the kernel says of the files right after the save returned.
- Restores read from a warm page cache.
- Flax's msgpack restores give numpy's arrays, and so do ours, also where the target's are on devices.
- GPT-2 small has 148 arrays in Flax: 12 in each of 12 layers, and 4.
"""
_LOSSES = """\
## Training time lost by a save in the background

`python -m tests.benchmarks.training_loop --write`, three saves a round, 8 s apart. Each system has processes of its
own, and systems take turns. A step reads and writes every array once, on all cores; those on devices donate the state.
*blocked* is how long the call took; *lost* is what the call and all steps until the next save took beyond as many steps
of the last third of that time, when the save has long ended."""
# Orbax's best ÷ ours, and seconds that a call may block for each 0.5 GB.
_LOST_GOAL, _BLOCKED_GOAL = 4.0, 0.1
_V1 = {one.name for one in peers.V1}


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, column names, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        """The table for RESULTS.md, and what is printed."""
        lines = [self.columns, ("---",) + ("---:",) * (len(self.columns) - 1), *self.rows]
        return "\n".join([f"### {self.title}", "", *("| " + " | ".join(cells) + " |" for cells in lines)])


def tables(workload: str, summary: str, series: Series) -> list[Table]:
    """One table for each operation on a workload."""
    columns = ("system", "median s", "min to max s", "peer ÷ ours", "÷ limit", "synced")
    systems = [one.name for one in rounds.SYSTEMS[workload]]
    made = []
    for operation in (SAVE, RESTORE):
        rows = [_row(series, operation, system) for system in systems if (system, operation) in series.entries]
        if rows:
            shown = columns if operation == SAVE else columns[:-1]
            title = f"{workload}, {operation} ({summary})"
            made.append(Table(title, shown, [row[: len(shown)] for row in rows]))
    return made


def _row(series: Series, operation: str, system: str) -> tuple[str, ...]:
    """What a system took, beside its fastest peer and the machine's limit."""
    entry = series.entries[system, operation]
    seconds = entry["seconds"]
    peer = series.fastest(_peers_of(system), operation)
    ratio = series.ratio(operation, peer[1], system) if peer else None
    beside = f"{ratio:.2f} ({peer[1]})" if peer and ratio is not None else ""
    raw = series.fastest([one.name for one in RAW], operation)
    limit = f"{statistics.median(seconds) / raw[0]:.2f}" if raw else ""
    spread = f"{_seconds(min(seconds))} to {_seconds(max(seconds))}"
    return (system, _seconds(statistics.median(seconds)), spread, beside, limit, _synced(entry["unsynced"]))


def _peers_of(system: str) -> list[str]:
    """The systems that one of ours is compared with, by the fastest of them; none for systems of others."""
    ours = {one.name: one.orbax for one in OURS}
    if system not in ours:
        return []
    return [one.name for one in rounds.ORBAX] if ours[system] else [FLAX[0].name]


def losses_table(losses: list[Entry], workload: Entry) -> Table:
    """Training time that saves of a workload cost, beside the least that those of Orbax do.

    ``losses`` are its entries in results.json: system, seconds that calls ``blocked``, and that saves ``lost``."""
    orbax = [statistics.median(one["lost"]) for one in losses if one["system"] in {peers.ASYNC.name, *_V1}]
    allowed, rows = _BLOCKED_GOAL * max(1.0, workload["nbytes"] / 0.5e9), []
    for one in losses:
        measured = []
        for seconds in (one["blocked"], one["lost"]):
            measured += [f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f} to {max(seconds):.3f}"]
        ratio = min(orbax) / max(statistics.median(one["lost"]), 1e-3)
        is_met = ratio >= _LOST_GOAL and statistics.median(one["blocked"]) <= allowed
        is_ours = one["system"] in {system.name for system in OURS}
        rows.append((one["system"], *measured, f"{ratio:.2f}", ("yes" if is_met else "no") if is_ours else ""))
    columns = ("system", "blocked, median s", "min to max s", "lost, median s", "min to max s", "Orbax's best ÷ it")
    goal = f"≥ {_LOST_GOAL:g}, blocked ≤ {allowed:.2g} s"
    return Table(f"{losses[0]['workload']} ({workload['title']})", (*columns, goal), rows)


def _synced(dirty: int | None) -> str:
    if dirty is None:
        return "unknown"
    return "yes" if dirty == 0 else f"no, {dirty / 1e6:{'.0f' if dirty > 1e8 else '.3g'}} MB only in memory"


def _seconds(value: float) -> str:
    return f"{value:.2g}" if value < 0.01 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def page(results: Results) -> str:
    """RESULTS.md."""
    of = {name: [one for one in results["seconds"] if one["workload"] == name] for name in results["workloads"]}
    count = min(len(one["seconds"]) for one in results["seconds"])
    head = _HEAD.format(rounds=count, small=count * rounds.SMALL_REPEATS, slow=rounds.SLOW_ROUNDS)
    facts = "\n".join(["| | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in results["machine"].items())])
    made = [
        table
        for name, workload in results["workloads"].items()
        for table in tables(name, workload["title"], Series(name, of[name]))
    ]
    lost: dict[str, list[Entry]] = {}
    for one in results["losses"]:
        lost.setdefault(one["workload"], []).append(one)
    beside = [losses_table(losses, results["workloads"][name]).markdown() for name, losses in lost.items()]
    measured = [table.markdown() for table in made]
    return "\n\n".join([f"{head}\n{facts}", *measured, _LOSSES, *beside]) + "\n"


def readme_table(results: Results) -> str:
    """The table of median seconds in README.md."""
    lines = [
        "| seconds | msgpack: ours | Flax | Orbax's format: ours | Flax on Orbax |",
        "|---|---:|---:|---:|---:|",
    ]
    medians = {(one["workload"], one["operation"], one["system"]): one["seconds"] for one in results["seconds"]}
    medians |= {(one["workload"], "lost", one["system"]): one["lost"] for one in results["losses"]}
    systems = [system.name for pair in zip(OURS, FLAX, strict=True) for system in pair]
    rows = [(f"{verb} {label}", name, verb, systems) for label, name in _README_ROWS for verb in (SAVE, RESTORE)]
    beside = [*systems[:3], peers.ASYNC.name]
    rows += [
        (f"training time lost to a background save of {label}", name, "lost", beside)
        for label, name in _README_ROWS
        if (name, "lost", systems[0]) in medians
    ]
    for label, workload, operation, names in rows:
        found = [statistics.median(medians[workload, operation, name]) for name in names]
        cells = [f"{value:.2f}" if value >= 0.1 else f"{value:.3f}" for value in found]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def updated(text: str, results: Results) -> str:
    """README's text with the figures of these results."""
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    assert begin and end, f"README.md has no {_BEGIN.strip()} … {_END}"
    return f"{head}{begin}\n{readme_table(results)}\n{end}{tail}"


def as_text(results: Results) -> str:
    """JSON with an entry to a line, so that two runs can be compared line by line."""
    parts = []
    for name, part in results.items():
        entries = part if isinstance(part, list) else [f"{json.dumps(key)}: {json.dumps(part[key])}" for key in part]
        lines = ",".join(f"\n  {one if isinstance(one, str) else json.dumps(one)}" for one in entries)
        opening, closing = "[]" if isinstance(part, list) else "{}"
        parts.append(f' "{name}": {opening}{lines}\n {closing}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write(results: Results) -> None:
    """Writes all three files."""
    DATA.write_text(as_text(results), encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    README.write_text(updated(README.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    write(json.loads(DATA.read_text(encoding="utf-8")))
