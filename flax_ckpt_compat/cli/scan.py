"""Define ``flax-ckpt scan``, and show what was found: as a table for people, as data, and as SARIF for code review."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from flax_ckpt_compat import __version__
from flax_ckpt_compat._core.text_formatting import counted
from flax_ckpt_compat._scan.findings import CHANGE, CHECK, KINDS, NOT_FOLLOWED, NOTHING
from flax_ckpt_compat._scan.project import Finding, ScanReport, scan
from flax_ckpt_compat._view.report import Line, Report

from ._command_base import Command, FailedError, echo, print_report

_COLORS = {"-": "red", "+": "green", "@": "cyan"}
_MOST_PLACES = 5  # that were not followed, where not all are asked for
_HANG = 4  # spaces before what continues a line, besides its own
_SARIF_LEVEL = {CHANGE: "error", CHECK: "warning", NOTHING: "note"}
_HEADINGS = {
    CHANGE: ("Change these: they expect a checkpoint to be one file", "red"),
    CHECK: ("Look at these", "yellow"),
    NOTHING: ("Nothing to do: these work on both formats with flax_ckpt_compat", "green"),
}


@click.command(
    cls=Command,
    examples="""
flax-ckpt scan .
flax-ckpt scan train.py eval.ipynb --verbose
flax-ckpt scan src --sarif > scan.sarif
flax-ckpt scan src --fix
""",
)
@click.argument("code", nargs=-1, required=True, metavar="CODE...", type=click.Path(exists=True))
@click.option("--json", "as_json", is_flag=True, help="JSON: one object a finding, with what each means.")
@click.option("--sarif", "as_sarif", is_flag=True, help="SARIF 2.1.0, for code review tools.")
@click.option(
    "--fix", "do_fix", is_flag=True, help="Show changes of imports and safe file operations as a diff, then ask."
)
@click.option("--yes", is_flag=True, help="With --fix: do not ask.")
@click.option("-v", "--verbose", is_flag=True, help="List also the places that need nothing.")
def command(code: tuple[str, ...], *, as_json: bool, as_sarif: bool, do_fix: bool, yes: bool, verbose: bool) -> bool:
    """Find the uses of flax.training.checkpoints in CODE, and what breaks when checkpoints become directories.

    CODE is Python files, notebooks, and folders of them. It is parsed, never run. Found are calls, imports,
    aliases and settings of the flag, and the code around them that expects a checkpoint to be one file:
    os.remove, shutil.copy, open, globs, uploads.

    Paths are followed from file to file: pass a whole project at once.

    Exit code 0 if nothing has to change, 1 if something has, 2 if a file of CODE cannot be read.
    """
    report = scan(code)
    is_data = as_json or as_sarif
    if do_fix and not is_data:
        is_fixed = _fix(report, yes=yes)
        report = scan(code)
        if is_fixed:
            _tell_of_flax(report)
    to_value = functools.partial(_to_sarif if as_sarif else _to_json, report)
    print_report(Report(lines_of(report, verbose=verbose), to_value), as_json=is_data)
    if not report.files:
        raise FailedError(f"no Python file or notebook below {', '.join(code)}: pass the files or folders of your code")
    has_changes = any(found.about.action == CHANGE for found in report.findings)
    if report.unreadable and not has_changes:  # nobody knows what they do
        sys.exit(FailedError.exit_code)
    if has_changes and not (is_data or do_fix):
        echo("Next: --fix shows changes of imports, os.remove and os.path.isfile as a diff, and asks.")
    return has_changes


def _fix(report: ScanReport, *, yes: bool) -> bool:
    """Show the changes as a diff and write them, each file at once; return whether none is left to write."""
    try:
        from flax_ckpt_compat._scan.fix import UnchangedError, fix
    except ImportError as error:
        raise FailedError("--fix needs libcst: pip install libcst") from error
    changed: dict[Path, str] = {}
    for path in dict.fromkeys(found.path for found in report.findings if found.cell is None):
        with tokenize.open(path) as file:
            before = file.read()
        try:
            after = fix(before, [found for found in report.findings if found.path == path])
        except UnchangedError as error:
            echo(f"Not changed: {path}: {error}. Change its imports by hand.")
            continue
        if after != before:
            changed[Path(path)] = after
            for line in difflib.unified_diff(before.splitlines(), after.splitlines(), path, path, lineterm=""):
                click.secho(line, fg=_COLORS.get(line[0]), bold=line.startswith(("---", "+++")))
    if any(found.cell for found in report.findings):
        echo(
            "Notebooks are not changed: put `import flax_ckpt_compat; flax_ckpt_compat.install()` into the first cell."
        )
    if changed and not (yes or click.confirm(f"Write {len(changed)} files?")):
        return False
    for name, text in changed.items():
        _replace(name, text)
    return True


def _tell_of_flax(report: ScanReport) -> None:
    """Name the lines that still use Flax's own module after all imports that can be were changed."""
    left = [found for found in report.findings if found.kind == "import" and found.cell is None]
    if left:
        echo(
            f"Still Flax's own module, so not this library: {', '.join(map(_where, left))}. "
            "Put `import flax_ckpt_compat; flax_ckpt_compat.install()` before these lines."
        )


def _replace(path: Path, text: str) -> None:
    """Write a file in its encoding and with its mode and line ends, atomically."""
    with path.open("rb") as file:
        encoding, _ = tokenize.detect_encoding(file.readline)
    newline = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
    with click.open_file(str(path), "w", encoding=encoding, atomic=True) as file:
        file.write(text.replace("\n", newline))


def lines_of(report: ScanReport, *, verbose: bool) -> Iterator[Line]:
    """Yield the findings by what they ask for, then by kind; if ``verbose``, also each place that needs nothing."""
    for action, (heading, style) in _HEADINGS.items():
        found = [finding for finding in report.findings if finding.about.action == action]
        if found:
            yield _line(f"[bold {style}]{heading}[/]")
        for kind, places in itertools.groupby(
            sorted(found, key=lambda one: list(KINDS).index(one.kind)), lambda one: one.kind
        ):
            yield from _of_kind(kind, list(places), list_all=verbose or action != NOTHING)
    yield from _not_followed(report, list_all=verbose)
    for path, reason in report.unreadable:
        yield _line(f"[yellow]Not read:[/] {escape(path)}: {escape(reason)}")
    changes = sum(finding.about.action == CHANGE for finding in report.findings)
    files = len({finding.path for finding in report.findings})
    uses = f"{len(report.findings)} uses in {files}; {changes} to change, {len(report.actions) - changes} to look at"
    if report.not_followed:
        uses += f", {len(report.not_followed)} not followed"
    if report.unreadable:
        uses += f", {len(report.unreadable)} not read"
    yield Line(f"{counted(report.files, 'file')}; {uses if files else 'no use of flax.training.checkpoints'}.")


def _not_followed(report: ScanReport, *, list_all: bool) -> Iterator[Line]:
    """Yield the places where the scan lost sight of checkpoints; of many only the first."""
    lost = report.not_followed
    if lost:
        yield _line("[bold yellow]Not followed: look yourself whether these handle checkpoints[/]")
    for kind, title in NOT_FOLLOWED.items():
        places = [place for place in lost if place.kind == kind]
        if places:
            yield _line(f"[bold]{title}[/] [dim]({len(places)})[/]", 2)
            yield from map(_place_line, places if list_all else places[:_MOST_PLACES])
            if len(places) > _MOST_PLACES and not list_all:
                yield _line(f"[dim]and {len(places) - _MOST_PLACES} more: --verbose lists them[/]", 6)


def _of_kind(kind: str, places: list[Finding], *, list_all: bool) -> Iterator[Line]:
    about = KINDS[kind]
    yield _line(f"[bold]{about.title}[/] [dim]({kind}, {len(places)})[/]", 2)
    if about.flax != about.shim:
        yield _line(f"[dim]flag on, Flax alone:[/] {escape(about.flax)}", 4)
        yield _line(f"[dim]with flax_ckpt_compat:[/] {escape(about.shim)}", 4)
    else:
        yield _line(f"[dim]flag on:[/] {escape(about.flax)}", 4)
    if about.remedy:
        yield _line(f"[dim]instead:[/] {escape(about.remedy)}", 4)
    yield from map(_place_line, places if list_all else [])


def _place_line(place: Finding) -> Line:
    text = f"      {_where(place)}  {place.code}"
    return Line(text, rich=functools.partial(_cut, text))


def _cut(text: str, width: int) -> Iterator[Text]:
    line = Text(text)
    line.truncate(width, overflow="ellipsis")
    yield line


def _line(markup: str, indent: int = 0) -> Line:
    """Return a line; on a terminal in the colours of the markup, and what continues it further to the right."""
    text = Text.from_markup(markup)
    return Line(" " * indent + text.plain, rich=functools.partial(_wrapped, text, indent))


def _wrapped(text: Text, indent: int, width: int) -> Iterator[Padding]:
    console = Console(width=width)
    first, *more = text.wrap(console, max(1, width - indent))
    rest = Text(" ").join(more).wrap(console, max(1, width - indent - _HANG))
    for line, left in [(first, indent), *((line, indent + _HANG) for line in rest if line)]:
        yield Padding(line, (0, 0, 0, left), expand=False)


def _where(finding: Finding) -> str:
    """Return the place of a finding, as editors open it: file:line, or file:cell N:line."""
    cell = f":cell {finding.cell}" if finding.cell else ""
    return f"{finding.path}{cell}:{finding.line}"


def _to_json(report: ScanReport) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {
        "files": report.files,
        "unreadable": [{"path": path, "reason": reason} for path, reason in report.unreadable],
        "findings": [{**dataclasses.asdict(found), **found.about._asdict()} for found in report.findings],
        "not_followed": [
            {**dataclasses.asdict(lost), "title": NOT_FOLLOWED[lost.kind]} for lost in report.not_followed
        ],
    }


def _to_sarif(report: ScanReport) -> dict[str, Any]:
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
    driver = {"name": "flax-ckpt scan", "version": __version__, "rules": rules}
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
