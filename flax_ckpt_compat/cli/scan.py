"""Define ``flax-ckpt scan``, and show the places that it lists."""

from __future__ import annotations

import difflib
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator

import click

from flax_ckpt_compat._core.text_formatting import counted
from flax_ckpt_compat._scan import ScanReport, scan
from flax_ckpt_compat._scan.findings import CHANGE, CHECK, KINDS, NOTHING, Finding
from flax_ckpt_compat._scan.fix import fix
from flax_ckpt_compat._view.report import Line, Report

from . import _command_base as base

_COLORS = {"-": "red", "+": "green", "@": "cyan"}
_HEADINGS = {
    CHANGE: ("Change these: they expect a checkpoint to be one file", "red"),
    CHECK: ("Look at these: some may handle checkpoints", "yellow"),
    NOTHING: ("Nothing to do: these work on both formats with flax_ckpt_compat", "green"),
}


@base.command("""
flax-ckpt scan .
flax-ckpt scan train.py eval.ipynb --verbose
flax-ckpt scan src --fix
""")
@click.argument("code", nargs=-1, required=True, metavar="CODE...", type=click.Path(exists=True))
@click.option("--json", "as_json", is_flag=True, help="JSON: one object a finding, with what each means.")
@click.option("--fix", "do_fix", is_flag=True, help="Show changes of imports as a diff, then ask.")
@click.option("--yes", is_flag=True, help="With --fix: do not ask.")
@click.option("-v", "--verbose", is_flag=True, help="List also the places that need nothing.")
def command(code: tuple[str, ...], *, as_json: bool, do_fix: bool, yes: bool, verbose: bool) -> bool:
    """Find what breaks in a program. CODE, Python files, notebooks and folders of them, is parsed, never run.

    Listed are calls, imports, aliases and settings of the flag; and, in files that use the API or are one import away,
    the calls that treat a path as one file: os.remove, shutil.copy, open, globs, uploads, shell commands.

    Exit code 0 if nothing has to change, 1 if something has, 2 if a file of CODE cannot be read.
    """
    report = scan(code)
    if do_fix and not as_json and _fix(report, yes=yes):
        report = scan(code)
        if left := [_where(found) for found in report.findings if found.kind == "import"]:
            base.echo(
                f"Still Flax's own module, so not this library: {', '.join(left)}. "
                "Put `import flax_ckpt_compat; flax_ckpt_compat.install()` before these lines."
            )
    value = {
        "files": report.files,
        "unreadable": [{"path": path, "reason": reason} for path, reason in report.unreadable],
        "findings": [{**KINDS[found.kind]._asdict(), **found._asdict()} for found in report.findings],
    }
    base.print_report(Report(_lines(report, verbose=verbose), lambda: value), as_json=as_json)
    if not report.files:
        raise base.FailedError(
            f"no Python file or notebook below {', '.join(code)}: pass the files or folders of your code"
        )
    has_changes = any(found.action == CHANGE for found in report.findings)
    if report.unreadable and not has_changes:  # nobody knows what they do
        sys.exit(base.FailedError.exit_code)
    return has_changes


def _fix(report: ScanReport, *, yes: bool) -> bool:
    """Show the changes as a diff and write them, each file at once; return whether none is left to write."""
    changed: dict[str, str] = {}
    for path in dict.fromkeys(found.path for found in report.findings if found.cell is None):
        with tokenize.open(path) as file:
            before = file.read()
        if (after := fix(before)) != before:
            changed[path] = after
            diff = difflib.unified_diff(before.splitlines(), after.splitlines(), path, path, lineterm="")
            base.print_lines(Line(line, _COLORS.get(line[0]), hang=None) for line in diff)
    if changed and not (yes or click.confirm(f"Write {len(changed)} files?")):
        return False
    for path, text in changed.items():  # in its encoding, with its mode and line ends
        with open(path, "rb") as raw:
            encoding, begin = tokenize.detect_encoding(raw.readline)
            newline = "\r\n" if b"\r\n" in b"".join([*begin, raw.read()]) else "\n"
        with click.open_file(path, "w", encoding=encoding, atomic=True) as file:
            file.write(text.replace("\n", newline))
    return True


def _lines(report: ScanReport, *, verbose: bool) -> Iterator[Line]:
    """Yield the findings by what they ask for, then by kind; if ``verbose``, also each place that needs nothing."""
    numbers = Counter(one.action for one in report.findings)
    for action, (heading, style) in _HEADINGS.items():
        yield from [Line(heading, f"bold {style}")] * bool(numbers[action])
        for kind, about in KINDS.items():
            found = [one for one in report.findings if (one.kind, one.action) == (kind, action)]
            if not found:
                continue
            yield Line(f"  {about.title} ({kind}, {len(found)})", "bold", hang=4)
            for word, text in [("flag on", about.happens), ("instead", about.remedy)]:
                yield from [Line(f"    {word}: {text}", hang=8)] * bool(text)
            for one in found if verbose or action != NOTHING else ():
                yield Line(f"      {_where(one)}  {one.code}", hang=None)
    for path, reason in report.unreadable:
        yield Line(f"Not read: {path}: {reason}", "yellow", hang=2)
    uses = "no use of flax.training.checkpoints"
    if report.findings:
        uses = f"{counted(len(report.findings), 'use')} in {len({one.path for one in report.findings})}"
        uses += f"; {numbers[CHANGE]} to change, {numbers[CHECK]} to look at"
    unread = f", {len(report.unreadable)} not read" if report.unreadable else ""
    yield Line(f"{counted(report.files, 'file')}; {uses}{unread}.")


def _where(finding: Finding) -> str:
    """Return the place of a finding, as editors open it: file:line, or file:cell N:line."""
    cell = f":cell {finding.cell}" if finding.cell else ""
    return f"{finding.path}{cell}:{finding.line}"
