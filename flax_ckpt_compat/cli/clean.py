"""Define ``flax-ckpt clean``."""

from __future__ import annotations

import sys

import click

from ._command_base import Command, FailedError, echo, is_terminal, json_option, path_argument, print_json


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
    from flax_ckpt_compat._core.errors import StorageError
    from flax_ckpt_compat._core.location import of_text
    from flax_ckpt_compat._core.text_formatting import format_size, printable
    from flax_ckpt_compat._save import interrupted_saves

    found = interrupted_saves.find_leftovers(of_text(directory))
    going = [one for one in found if not one.kept or (force and one.by_time)]
    if as_json:
        fields = ("what", "nbytes", "kept")
        print_json([{"path": one.location.path} | {name: getattr(one, name) for name in fields} for one in found])
    else:
        for one in found:
            note = f"; stays, because {one.kept}" if one not in going else f", although {one.kept}" if one.kept else ""
            echo(f"{format_size(one.nbytes):>8}  {printable(one.what, one_line=True)}{note}", f"{'':10}")
            click.echo(f"{'':10}{printable(one.location.path, one_line=True)}")
        click.echo(f"{len(going)} to remove, {format_size(sum(one.nbytes for one in going))}.")
        protected = sum(one.nbytes for one in found if one.by_time and one not in going)
        if protected:
            echo(f"--force removes {format_size(protected)} more, which only time protects: if nothing is saving here.")
    if not going:
        return False
    if not (dry_run or yes) and (as_json or not is_terminal(sys.stdin)):
        raise FailedError("nothing was removed, because there is no terminal to ask on: pass --yes or --dry-run")
    if dry_run or not (yes or click.confirm("Remove them?")):
        return True
    left = 0
    for one in going:
        try:
            left += not interrupted_saves.remove(one, force=force)
        except StorageError as error:
            left += 1
            echo(f"Error: {error}", err=True)
    click.echo(f"Removed {len(going) - left} of {len(going)}.", err=as_json)
    return left > 0
