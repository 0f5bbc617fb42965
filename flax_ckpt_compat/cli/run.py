"""Define ``flax-ckpt run``: run an unmodified program with our functions in ``flax.training.checkpoints``.

Python itself runs the program, with a folder on ``PYTHONPATH`` whose ``sitecustomize`` installs them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import click

from ._command_base import path_argument

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pythonpath")
_EXAMPLES = """\b
Examples:
  flax-ckpt run train.py --workdir runs/a
  flax-ckpt run -m package.train --workdir runs/a
  PYTHONPATH="$(flax-ckpt run --pythonpath)" ./start.sh
"""
# With these, Python ignores PYTHONPATH; the scripts of some installers have them.
_IGNORE_ENVIRONMENT = {"-E", "-I"}
_INTERPRETER = re.compile(r"python(\d+(\.\d+)*t?)?")


class _RunCommand(click.Command):
    """Command that passes all arguments after the script to it, even `--help`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours = not args or args[0] in (*ctx.help_option_names, "--pythonpath")
        return super().parse_args(ctx, args if ours else ["--", *args])


@click.command(cls=_RunCommand, options_metavar="", epilog=_EXAMPLES)
@click.option("--pythonpath", is_flag=True, help="Print the folder to put on PYTHONPATH instead, and exit.")
@path_argument(
    "program", nargs=-1, type=click.UNPROCESSED, metavar="(SCRIPT | -m MODULE | -c CODE) [ARGS]...", callback=None
)
def command(program: tuple[str, ...], *, pythonpath: bool) -> None:
    """Run a program unchanged, with the shim installed.

    SCRIPT is a file, or a folder or zip file with a __main__.py, just as for python itself. Arguments,
    exit code, output and tracebacks are the program's own. All Python programs that it starts have the shim
    too, through the environment variable PYTHONPATH.
    """
    if pythonpath:
        click.echo(_FOLDER)
        return
    script = program[1:] if program[:1] == ("--",) else program
    if script[:1] in ((), ("-",)):
        raise click.UsageError("a script file or -m MODULE is needed; a program typed on standard input cannot be run")
    if _is_interpreter(script[0]):
        raise click.UsageError(
            f"leave out {script[0]}: the script runs with {sys.executable}; for another Python, put the folder that "
            "`flax-ckpt run --pythonpath` prints on its PYTHONPATH"
        )
    if program in (("-m",), ("-c",)):
        raise click.UsageError(f"{program[0]} needs {'the name of a module' if program[0] == '-m' else 'a program'}")
    if program[0].startswith("-") and program[0] != "--" and not program[0].startswith(("-m", "-c")):
        raise click.NoSuchOption(
            program[0], message=f"No such option: {program[0]} (the program's options go after its name)"
        )
    path = os.pathsep.join(filter(None, (_FOLDER, os.environ.get("PYTHONPATH"))))
    words = [sys.executable, *_python_options(), *program]
    os.execve(sys.executable, words, {**os.environ, "PYTHONPATH": path})  # noqa: S606


def _is_interpreter(script: str) -> bool:
    """Return whether a script is Python, by its name; a plain file, or a folder with ``__main__``, is a program."""
    if not _INTERPRETER.fullmatch(os.path.basename(script)):
        return False
    if os.path.isdir(script):
        return not any(os.path.isfile(os.path.join(script, f"__main__.{kind}")) for kind in ("py", "pyc"))
    return os.access(script, os.X_OK) or not os.path.exists(script)


def _python_options() -> list[str]:
    """Return the options of this Python, such as ``-u`` and ``-X dev``."""
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False):
        options.append("-u")
    return [option for option in options if option not in _IGNORE_ENVIRONMENT]
