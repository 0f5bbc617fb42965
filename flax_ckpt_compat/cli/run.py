"""Define ``flax-ckpt run``: run an unmodified program with our functions in ``flax.training.checkpoints``.

Python itself runs the program, with a folder on ``PYTHONPATH`` whose ``sitecustomize`` installs them."""

from __future__ import annotations

import os
import re
import sys

import click

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pythonpath")
_PROGRAM = "(SCRIPT | -m MODULE | -c CODE) [ARGS]..."
_EXAMPLES = """\b
Examples:
  flax-ckpt run train.py --workdir runs/a
  flax-ckpt run -m package.train --workdir runs/a
  PYTHONPATH="$(flax-ckpt run --pythonpath)" ./start.sh
"""
_INTERPRETER = re.compile(r"python(\d+(\.\d+)*t?)?")


class _RunCommand(click.Command):
    """Command that passes all arguments after the script to it, even `--help`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours = not args or args[0] in (*ctx.help_option_names, "--pythonpath")
        return super().parse_args(ctx, args if ours else ["--", *args])


@click.command(cls=_RunCommand, options_metavar="", epilog=_EXAMPLES)
@click.option("--pythonpath", is_flag=True, help="Print the folder to put on PYTHONPATH instead, and exit.")
@click.argument("program", nargs=-1, type=click.Path(readable=False), metavar=_PROGRAM)
def command(program: tuple[str, ...], *, pythonpath: bool) -> None:
    """Run a program unchanged, with the shim installed.

    SCRIPT is a file, or a folder or zip file with a __main__.py, just as for python itself. Arguments,
    exit code, output and tracebacks are the program's own. All Python programs that it starts have the shim
    too, through the environment variable PYTHONPATH.
    """
    if pythonpath:
        click.echo(_FOLDER)
        return
    script = next((word for word in program if word != "--"), "-")
    if script == "-":
        raise click.UsageError("a script file or -m MODULE is needed; a program typed on standard input cannot be run")
    if _INTERPRETER.fullmatch(os.path.basename(script)):
        raise click.UsageError(
            f"leave out {script}: the script runs with {sys.executable}; for another Python, put the folder that "
            "`flax-ckpt run --pythonpath` prints on its PYTHONPATH"
        )
    if program[0] != "--" and re.match(r"-(?![mc])", program[0]):
        raise click.UsageError(f"No such option: {program[0]} (the program's options go after its name)")
    path = os.pathsep.join(filter(None, (_FOLDER, os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, *program], {**os.environ, "PYTHONPATH": path})  # noqa: S606
