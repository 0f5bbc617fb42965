"""Define ``flax-ckpt scan``."""

from __future__ import annotations

import difflib
import sys
import tokenize
from pathlib import Path

import click

from flax_ckpt_compat import __version__
from flax_ckpt_compat._scan.findings import CHANGE
from flax_ckpt_compat._scan.project import ScanReport, scan
from flax_ckpt_compat._scan.report import print_report, to_json, to_sarif, where

from ._command_base import Command, FailedError, echo, is_terminal, make_console, print_json

_COLORS = {"-": "red", "+": "green", "@": "cyan"}


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
    if as_json or as_sarif:
        print_json(to_sarif(report, __version__) if as_sarif else to_json(report))
    elif do_fix:
        is_written = _fix(report, yes=yes)
        report = scan(code)
        if is_written:
            _tell_of_flax(report)
    if not (as_json or as_sarif):
        print_report(report, make_console(highlight=True, soft_wrap=not is_terminal(sys.stdout)), verbose=verbose)
    if not report.files:
        raise FailedError(f"no Python file or notebook below {', '.join(code)}: pass the files or folders of your code")
    has_changes = any(found.about.action == CHANGE for found in report.findings)
    if report.unreadable and not has_changes:  # nobody knows what they do
        sys.exit(FailedError.exit_code)
    if has_changes and not (as_json or as_sarif or do_fix):
        echo("Next: --fix shows changes of imports, os.remove and os.path.isfile as a diff, and asks.")
    return has_changes


def _fix(report: ScanReport, *, yes: bool) -> bool:
    """Show the changes as a diff and write them, each file at once; return whether they are written."""
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
    if not changed or not (yes or click.confirm(f"Write {len(changed)} files?")):
        return False
    for name, text in changed.items():
        _replace(name, text)
    return True


def _tell_of_flax(report: ScanReport) -> None:
    """Name the files that still use Flax's own module after their imports were changed."""
    left = [found for found in report.findings if found.kind == "import" and found.cell is None]
    if left:
        echo(
            f"Still Flax's own module, so not this library: {', '.join(map(where, left))}. "
            "Put `import flax_ckpt_compat; flax_ckpt_compat.install()` before these lines."
        )


def _replace(path: Path, text: str) -> None:
    """Write a file in its encoding and with its mode and line ends, atomically."""
    with path.open("rb") as file:
        encoding, _ = tokenize.detect_encoding(file.readline)
    newline = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
    with click.open_file(str(path), "w", encoding=encoding, atomic=True) as file:
        file.write(text.replace("\n", newline))
