"""Show what a scan found: as a table for people, as data, and as SARIF for code review tools."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from .findings import CHANGE, CHECK, KINDS, NOT_FOLLOWED, NOTHING
from .project import Finding, ScanReport

_MOST_PLACES = 5  # that were not followed, where not all are asked for
_HANG = 4  # spaces before what continues a line, besides its own
_SARIF_LEVEL = {CHANGE: "error", CHECK: "warning", NOTHING: "note"}
_HEADINGS = {
    CHANGE: ("Change these: they expect a checkpoint to be one file", "red"),
    CHECK: ("Look at these", "yellow"),
    NOTHING: ("Nothing to do: these work on both formats with flax_ckpt_compat", "green"),
}


def print_report(report: ScanReport, console: Console, *, verbose: bool) -> None:
    """Print the findings by what they ask for, then by kind; if ``verbose``, also each place that needs nothing."""
    for action, (heading, style) in _HEADINGS.items():
        found = [finding for finding in report.findings if finding.about.action == action]
        if found:
            console.print(f"[bold {style}]{heading}[/]")
        for kind, places in itertools.groupby(
            sorted(found, key=lambda one: list(KINDS).index(one.kind)), lambda one: one.kind
        ):
            _print_kind(kind, list(places), console, list_all=verbose or action != NOTHING)
    _print_not_followed(report, console, list_all=verbose)
    for path, reason in report.unreadable:
        console.print(f"[yellow]Not read:[/] {escape(path)}: {escape(reason)}", soft_wrap=True)
    changes = sum(finding.about.action == CHANGE for finding in report.findings)
    files = len({finding.path for finding in report.findings})
    uses = f"{len(report.findings)} uses in {files}; {changes} to change, {len(report.actions) - changes} to look at"
    if report.not_followed:
        uses += f", {len(report.not_followed)} not followed"
    if report.unreadable:
        uses += f", {len(report.unreadable)} not read"
    console.print(
        f"{report.files} file{'s' * (report.files != 1)}; {uses if files else 'no use of flax.training.checkpoints'}.",
        highlight=False,
    )


def _print_not_followed(report: ScanReport, console: Console, *, list_all: bool) -> None:
    """Print the places where the scan lost sight of checkpoints; of many only the first."""
    lost = report.not_followed
    if not lost:
        return
    console.print("[bold yellow]Not followed: look yourself whether these handle checkpoints[/]")
    for kind, title in NOT_FOLLOWED.items():
        places = [place for place in lost if place.kind == kind]
        if places:
            _print(console, 2, f"[bold]{title}[/] [dim]({len(places)})[/]")
            _print_places(places if list_all else places[:_MOST_PLACES], console)
            if len(places) > _MOST_PLACES and not list_all:
                _print(console, 6, f"[dim]and {len(places) - _MOST_PLACES} more: --verbose lists them[/]")


def _print_kind(kind: str, places: list[Finding], console: Console, *, list_all: bool) -> None:
    about = KINDS[kind]
    _print(console, 2, f"[bold]{about.title}[/] [dim]({kind}, {len(places)})[/]")
    if about.flax != about.shim:
        _print(console, 4, f"[dim]flag on, Flax alone:[/] {escape(about.flax)}")
        _print(console, 4, f"[dim]with flax_ckpt_compat:[/] {escape(about.shim)}")
    else:
        _print(console, 4, f"[dim]flag on:[/] {escape(about.flax)}")
    if about.remedy:
        _print(console, 4, f"[dim]instead:[/] {escape(about.remedy)}")
    _print_places(places if list_all else [], console)


def _print_places(places: list[Finding], console: Console) -> None:
    for place in places:
        console.print(
            f"      {escape(where(place))}  {escape(place.code)}", highlight=False, no_wrap=True, overflow="ellipsis"
        )


def _print(console: Console, indent: int, markup: str) -> None:
    """Print a line; indent what continues it by more."""
    text = Text.from_markup(markup)
    if console.soft_wrap:
        console.print(Text(" " * indent).append_text(text), highlight=False)
        return
    first, *more = text.wrap(console, max(1, console.width - indent))
    rest = Text(" ").join(more).wrap(console, max(1, console.width - indent - _HANG))
    for line, left in [(first, indent), *((line, indent + _HANG) for line in rest if line)]:
        console.print(Padding(line, (0, 0, 0, left), expand=False), highlight=False)


def where(finding: Finding) -> str:
    """Return the place of a finding, as editors open it: file:line, or file:cell N:line."""
    cell = f":cell {finding.cell}" if finding.cell else ""
    return f"{finding.path}{cell}:{finding.line}"


def to_json(report: ScanReport) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {
        "files": report.files,
        "unreadable": [{"path": path, "reason": reason} for path, reason in report.unreadable],
        "findings": [{**dataclasses.asdict(found), **found.about._asdict()} for found in report.findings],
        "not_followed": [
            {**dataclasses.asdict(lost), "title": NOT_FOLLOWED[lost.kind]} for lost in report.not_followed
        ],
    }


def to_sarif(report: ScanReport, version: str) -> dict[str, Any]:
    """Return the report in SARIF 2.1.0, which GitHub and editors read; columns count from 1 there.

    A finding in a notebook has the line of its cell, and the cell's number in the message.
    """
    rules = [
        {"id": kind, "shortDescription": {"text": about.title}, "help": {"text": about.remedy or about.shim}}
        for kind, about in KINDS.items()
    ]
    rules += [
        {"id": f"not-followed-{kind}", "shortDescription": {"text": title}, "help": {"text": "look yourself"}}
        for kind, title in NOT_FOLLOWED.items()
    ]
    results = [_result(found) for found in report.findings]
    results += [
        _place(lost, f"not-followed-{lost.kind}", "note", NOT_FOLLOWED[lost.kind]) for lost in report.not_followed
    ]
    driver = {"name": "flax-ckpt scan", "version": version, "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _result(found: Finding) -> dict[str, Any]:
    about = found.about
    remedy = f" Instead: {about.remedy}." if about.remedy else ""
    text = f"{about.title}. With the flag on: {about.shim}.{remedy}"
    return _place(found, found.kind, _SARIF_LEVEL[about.action], text)


def _place(found: Finding, rule: str, level: str, text: str) -> dict[str, Any]:
    cell = f"Cell {found.cell}: " if found.cell else ""
    location = {
        "artifactLocation": {"uri": found.path.replace("\\", "/")},
        "region": {"startLine": found.line, "startColumn": found.column + 1},
    }
    return {
        "ruleId": rule,
        "level": level,
        "message": {"text": f"{cell}{text}"},
        "locations": [{"physicalLocation": location}],
    }
