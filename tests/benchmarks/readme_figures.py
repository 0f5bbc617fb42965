"""The table of figures in README.md, made from results.json.

``python -m tests.benchmarks.readme_figures`` writes it; ``--check`` exits with 1 where README shows other figures.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks import peers
from tests.benchmarks.series import Series
from tests.benchmarks.systems import FLAX, OURS, RESTORE, SAVE

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
RESULTS = Path(__file__).with_name("results.json")
_BEGIN = "<!-- figures: written by `python -m tests.benchmarks.readme_figures` -->\n"
_END = "<!-- end of figures -->"
_ROWS = (
    ("0.5 GB (GPT-2 small)", "gpt2-jax"),
    ("1.5 GB (with Adam's state)", "gpt2+adamw"),
    ("5,000 arrays, 2.6 MB", "leaves-jax"),
)


def table(results: dict[str, Any]) -> str:
    """Return the table of median seconds as markdown.

    Args:
        results: content of results.json.
    """
    lines = [
        "| seconds | msgpack: ours | Flax | Orbax's format: ours | Flax on Orbax |",
        "|---|---:|---:|---:|---:|",
    ]
    systems = [system.name for pair in zip(OURS, FLAX, strict=True) for system in pair]
    for label, workload in _ROWS:
        series = Series.of([entry for entry in results["seconds"] if entry["workload"] == workload])
        for operation in (SAVE, RESTORE):
            cells = [_seconds(series.median(system, operation)) for system in systems]
            lines.append(f"| {operation} {label} | {' | '.join(cells)} |")
    losses = {(one["workload"], one["system"]): statistics.median(one["lost"]) for one in results.get("losses", ())}
    beside = (OURS[0].name, FLAX[0].name, OURS[1].name, peers.ASYNC.name)
    for label, workload in _ROWS:
        if (workload, OURS[0].name) in losses:
            cells = [_seconds(losses[workload, system]) for system in beside]
            lines.append(f"| training time lost to a background save of {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _seconds(value: float | None) -> str:
    assert value is not None, "results.json is of a run with all workloads"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def updated(text: str, results: dict[str, Any]) -> str:
    """Return README's text with the figures of these results."""
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    assert begin and end, f"README.md has no {_BEGIN.strip()} … {_END}"
    return f"{head}{begin}\n{table(results)}\n{end}{tail}"


def main() -> int:
    """Write the table, or compare it with ``--check``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if README is stale")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    new = updated(text, json.loads(RESULTS.read_text(encoding="utf-8")))
    if check and new != text:
        print(f"{README} does not show the figures of {RESULTS}: run python -m tests.benchmarks.readme_figures")
        return 1
    if not check:
        README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
