"""Define ``flax-ckpt clean``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from flax_ckpt_compat._core.text_formatting import format_size, printable
from flax_ckpt_compat._view.report import Line, Report

from ._command_base import Command, json_option, may_remove, path_argument, print_report, remove_all

if TYPE_CHECKING:
    from flax_ckpt_compat._save.interrupted_saves import Leftover


@click.command(
    cls=Command,
    examples="""
flax-ckpt clean runs/a --dry-run
flax-ckpt clean runs                 asks before it removes anything
flax-ckpt clean gs://bucket/runs --yes
flax-ckpt clean runs --force         also what was changed today, where nothing saves any more
""",
)
@path_argument("directory")
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also what was changed within 24 hours: nothing may be saving here.")
@json_option("a JSON list of what there is")
def command(directory: str, *, dry_run: bool, yes: bool, force: bool, as_json: bool) -> bool:
    """Remove what interrupted saves left in DIRECTORY and below it.

    That is: temporaries whose writer is dead, unfinished uploads, and the arrays of several processes (_gda) without
    their checkpoint. What a live writer may still write stays: of writers that leave no trace of their process, such
    as real Flax and Orbax, and of those whose locks do not reach this machine, all that changed within 24 hours, unless
    you pass --force. No checkpoint is ever removed.

    Exit code 0 if nothing is left, 1 if something is (after --dry-run, a no, or where the system refused), 2 if
    DIRECTORY cannot be listed.
    """
    from flax_ckpt_compat._core.location import of_text
    from flax_ckpt_compat._save import interrupted_saves

    found = interrupted_saves.find_leftovers(of_text(directory))
    going = [one for one in found if not one.kept or (force and one.by_time)]
    lines = _lines(found, going)
    fields = ("what", "nbytes", "kept")
    value = [{"path": one.location.path} | {name: getattr(one, name) for name in fields} for one in found]
    print_report(Report(lines, lambda: value), as_json=as_json)
    if not going:
        return False
    if not may_remove(yes=yes, dry_run=dry_run, as_json=as_json):
        return True
    return remove_all(going, functools.partial(interrupted_saves.remove, force=force), err=as_json)


def _lines(found: Sequence[Leftover], going: Sequence[Leftover]) -> Iterator[Line]:
    """Yield what there is, and how much of it goes."""
    for one in found:
        note = f"; stays, because {one.kept}" if one not in going else f", although {one.kept}" if one.kept else ""
        yield Line(f"{format_size(one.nbytes):>8}  {printable(one.what, one_line=True)}{note}", hang=10)
        yield Line(f"{'':10}{printable(one.location.path, one_line=True)}")
    yield Line(f"{len(going)} to remove, {format_size(sum(one.nbytes for one in going))}.")
    protected = sum(one.nbytes for one in found if one.by_time and one not in going)
    if protected:
        yield Line(
            f"--force removes {format_size(protected)} more, which only time protects: if nothing is saving here."
        )
