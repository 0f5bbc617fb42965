"""Define ``flax-ckpt run``: run an unmodified program with our functions in ``flax.training.checkpoints``."""

from __future__ import annotations

import click

from ._program import Program


class _RunCommand(click.Command):
    """Command that passes all arguments after the script to it, even `--help`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours = not args or args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if ours else ["--", *args])


@click.command(cls=_RunCommand, options_metavar="")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="(SCRIPT | -m MODULE) [ARGS]...")
def command(program: tuple[str, ...]) -> None:
    """Run a program unchanged, with the shim installed.

    SCRIPT is a file, or a folder or zip file with a __main__.py, just as for python itself. Arguments,
    exit code, output and tracebacks are the program's own. Worker processes that multiprocessing starts
    have the shim too; other programs that it starts do not, unless they are started by "flax-ckpt run".
    """
    if program == ("-m",):
        raise click.UsageError("-m needs the name of a module")
    script = program[1:] if program[0] == "--" else program
    if script[:1] in ((), ("-",)):
        raise click.UsageError("a script file or -m MODULE is needed; a program typed on standard input cannot be run")
    if program[0].startswith("-") and program[0] != "--" and not program[0].startswith("-m"):
        raise click.NoSuchOption(
            program[0], message=f"No such option: {program[0]} (the program's options go after its name)"
        )
    raise Program(program)
