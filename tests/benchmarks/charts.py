"""The figures of results.json as SVG files for the guide, written as plain text; readable in light and in dark."""

import datetime
import math
import statistics
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from tests.benchmarks.systems import FLAX, OURS, RAW, RESTORE, SAVE

_COLOURS = {OURS[0].name: "#0b8f88", OURS[1].name: "#7c6ff0", FLAX[0].name: "#d1495b", FLAX[1].name: "#d98324"}
_OTHERS = "#8a8f98"
_DASHES = {FLAX[0].name: "6 4", FLAX[1].name: "6 4"}
_STYLE = """\
  text { font: 13px system-ui, sans-serif; fill: #24292f; stroke: #ffffff; stroke-width: 3px; paint-order: stroke }
  .title { font-size: 16px; font-weight: 600 }
  .small { font-size: 11px; fill: #57606a }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  .limit { stroke: #24292f; stroke-width: 1.5; stroke-dasharray: 3 3 }
  .paper { fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; stroke: #0d1117 } .small { fill: #9da7b3 } .grid { stroke: #30363d }
    .limit { stroke: #e6edf3 } .paper { fill: #0d1117 }
  }"""
_WIDTH, _ROW = 760, 24
_LEFT, _RIGHT, _TOP = 70, 190, 62
_NAMES, _FIGURES = 230, 80  # columns beside the bars
_PLOT_HEIGHT = 320
_LARGE = ("gpt2-jax", "gpt2+adamw", "array")
_Point = tuple[float, float]


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes a chart for everything that was measured.

    Args:
        results: machine, workloads, seconds, peaks and growth, as in results.json; what is absent gets no chart.
        folder: made if need be.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    below = _machine(results["machine"])
    files = []
    for name, (title, draw) in _charts(results).items():
        drawn, height = draw()
        file = folder / f"{name}.svg"
        file.write_text(_page(title, drawn, height, below), encoding="utf-8")
        files.append(file)
    return files


def _charts(results: dict[str, Any]) -> dict[str, tuple[str, Callable[[], tuple[list[str], float]]]]:
    found: dict[str, tuple[str, Callable[[], tuple[list[str], float]]]] = {}
    for by, unit in (("leaves", "leaves of 520 bytes"), ("bytes", "bytes in 8 leaves")):
        for operation in (SAVE, RESTORE):
            lines = _growth_lines(results, by, operation)
            if lines:
                title = f"Seconds to {operation}, by {unit}"
                found[f"{operation}-by-{by}"] = (title, lambda lines=lines, by=by: _plot(lines, by))
    for workload in _LARGE:
        for operation in (SAVE, RESTORE):
            bars, limit = _bars_of(results, workload, operation)
            if bars:
                title = f"Seconds to {operation}: {results['workloads'][workload]['title']}"
                found[f"{operation}-{workload.replace('+', '-')}"] = (
                    title,
                    lambda bars=bars, limit=limit: _bars(bars, limit, "s"),
                )
    for operation in (SAVE, RESTORE):
        peaks, workload = _peaks_of(results, operation)
        if peaks:
            beyond = "the tree" if operation == SAVE else "the result"
            title = f"Memory above {beyond} at the peak of a {operation} of {workload}, MiB"
            found[f"memory-{operation}"] = (title, lambda peaks=peaks: _bars(peaks, None, "MiB"))
    return found


def _growth_lines(results: dict[str, Any], by: str, operation: str) -> dict[str, list[_Point]]:
    lines: dict[str, list[_Point]] = {}
    for entry in results.get("growth", ()):
        if (entry["by"], entry["operation"]) == (by, operation):
            lines.setdefault(entry["system"], []).append((entry["at"], min(entry["seconds"])))
    return {system: sorted(points) for system, points in lines.items() if len(points) > 1}


def _bars_of(results: dict[str, Any], workload: str, operation: str) -> tuple[dict[str, float], float | None]:
    found = {
        entry["system"]: statistics.median(entry["seconds"])
        for entry in results["seconds"]
        if (entry["workload"], entry["operation"]) == (workload, operation)
    }
    raw = [found.pop(system.name) for system in RAW if system.name in found]
    return dict(sorted(found.items(), key=lambda item: item[1])), min(raw, default=None)


def _peaks_of(results: dict[str, Any], operation: str) -> tuple[dict[str, float], str]:
    """Bars of the first large workload that was measured."""
    for workload in _LARGE:
        found = {
            entry["system"]: max(0.0, entry["bytes"] / 2**20)
            for entry in results.get("peaks", ())
            if (entry["workload"], entry["operation"]) == (workload, operation) and entry["bytes"] is not None
        }
        if found:
            return dict(sorted(found.items(), key=lambda item: item[1])), workload
    return {}, ""


def _plot(lines: dict[str, list[_Point]], by: str) -> tuple[list[str], float]:
    """Lines on two logarithmic axes, each with its name at its end."""
    everything = [point for points in lines.values() for point in points]
    across = _Scale([x for x, _ in everything], _LEFT, _WIDTH - _RIGHT)
    up = _Scale([y for _, y in everything], _TOP + _PLOT_HEIGHT, _TOP)
    right, bottom = _WIDTH - _RIGHT, _TOP + _PLOT_HEIGHT
    drawn = []
    for value, x in across.ticks:
        drawn.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>')
        drawn.append(_text(x, bottom + 20, _count(value, by), "middle"))
    for value, y in up.ticks:
        drawn.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        drawn.append(_text(_LEFT - 8, y + 4, f"{value:g} s", "end"))
    for system, points in lines.items():
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in points)
        dash = f' stroke-dasharray="{_DASHES[system]}"' if system in _DASHES else ""
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{_colour(system)}" stroke-width="2.5"{dash}/>')
        drawn += [
            f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3.5" fill="{_colour(system)}"/>' for x, y in points
        ]
    ends = {system: (across.at(points[-1][0]), up.at(points[-1][1])) for system, points in lines.items()}
    return drawn + list(_end_labels(ends)), bottom + 30


def _end_labels(ends: dict[str, _Point]) -> Iterator[str]:
    """Names beside the ends of the lines, moved apart where two would overlap."""
    least = -math.inf
    for system, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        least = max(y + 4, least + 17)
        yield _text(max(x + 10, _WIDTH - _RIGHT + 10), least, system, fill=_colour(system))


def _bars(values: dict[str, float], limit: float | None, unit: str) -> tuple[list[str], float]:
    """A bar for each system, shortest first; the limit is a line across all."""
    left, widest = _NAMES, max([*values.values(), limit or 0]) or 1
    scale = (_WIDTH - left - _FIGURES) / widest
    drawn, figures = [], []
    for number, (system, value) in enumerate(values.items()):
        y = _TOP + number * _ROW
        drawn.append(_text(left - 10, y + 15, system, "end"))
        width = max(1.0, value * scale)
        drawn.append(
            f'<rect x="{left}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 7}" rx="2" fill="{_colour(system)}"/>'
        )
        figure = f"{value:.0f} {unit}" if unit == "MiB" else f"{value:.3g} {unit}"
        figures.append(_text(left + width + 6, y + 15, figure))
    bottom = _TOP + len(values) * _ROW
    if limit is not None:
        x = left + limit * scale
        drawn.append(f'<line class="limit" x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{bottom + 4}"/>')
        drawn.append(_text(x, bottom + 18, f"raw file: {limit:.3g} {unit}", "middle"))
        bottom += 22
    return drawn + figures, bottom + 8


class _Scale:
    """A logarithmic axis.

    Attributes:
        ticks: (value, place) of the powers of ten on it.
    """

    def __init__(self, values: list[float], first: float, last: float) -> None:
        self._least, self._most = math.log10(min(values)), math.log10(max(values))
        self._first, self._last = first, last
        powers = range(math.ceil(self._least - 1e-9), math.floor(self._most + 1e-9) + 1)
        self.ticks = [(10.0**power, self.at(10.0**power)) for power in powers]

    def at(self, value: float) -> float:
        """The place of a value."""
        part = (math.log10(value) - self._least) / ((self._most - self._least) or 1)
        return self._first + part * (self._last - self._first)


def _count(value: float, by: str) -> str:
    if by != "bytes":
        return f"{value:,.0f}"
    return next(f"{value / size:g} {unit}" for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if value >= size)


def _colour(system: str) -> str:
    return next((colour for name, colour in _COLOURS.items() if system.startswith(name)), _OTHERS)


def _text(x: float, y: float, text: str, anchor: str = "start", *, fill: str = "") -> str:
    style = f' style="fill: {fill}; font-weight: 600"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _machine(facts: dict[str, str]) -> str:
    shown = [
        f"{facts[name]} {word}".strip() for name, word in (("CPUs", "CPUs"), ("memory", "memory")) if name in facts
    ]
    shown += [f"{name} {facts[name]}" for name in ("Python", "jax", "flax", "orbax-checkpoint") if name in facts]
    date = facts.get("date") or datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"{', '.join(shown)}; {date}"


def _page(title: str, drawn: list[str], height: float, below: str) -> str:
    whole = height + 28
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {whole:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_STYLE}\n</style>",
            f'<rect class="paper" width="{_WIDTH}" height="{whole:.0f}" rx="8"/>',
            f'<text class="title" x="20" y="32">{escape(title)}</text>',
            *drawn,
            f'<text class="small" x="20" y="{whole - 12:.0f}">{escape(below)}</text>',
            "</svg>\n",
        ]
    )
