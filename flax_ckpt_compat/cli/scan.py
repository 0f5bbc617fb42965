"""Define ``flax-ckpt scan``; imports are deferred, because the help of all commands loads this module."""

from __future__ import annotations

import click

from ._command_base import Command


@click.command(
    cls=Command,
    short_help="Find what breaks in a program.",
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
    from ._scan import run

    return run(code, as_json=as_json, as_sarif=as_sarif, do_fix=do_fix, yes=yes, verbose=verbose)
