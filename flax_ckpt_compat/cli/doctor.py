"""Define ``flax-ckpt doctor``."""

from __future__ import annotations

import click

from ._command_base import Command, echo, json_option, path_argument, print_json


@click.command(
    cls=Command,
    short_help="Print what a bug report needs.",
    examples="""
flax-ckpt doctor
flax-ckpt doctor runs/a s3://bucket/runs     also: can these be listed
flax-ckpt run -m flax_ckpt_compat doctor     inside of flax-ckpt run
""",
)
@path_argument("paths", metavar="[PATH]...", nargs=-1)
@json_option("JSON")
def command(paths: tuple[str, ...], *, as_json: bool) -> bool:
    """Print what a bug report needs: versions, Flax's flag, settings, what is patched, and whether PATHs can be listed.

    Exit code 1 if something is wrong: a library is missing or fails to import, or a PATH does not exist or cannot be
    listed.
    """
    from ._doctor import examine

    report = examine(paths)
    if as_json:
        print_json(report.sections)
    else:
        for title, values in report.sections.items():
            click.secho(title, bold=True)
            for name, value in values.items():
                echo(f"  {name:<28} {value}", f"{'':31}")
    for problem in report.problems:
        echo(f"Problem: {problem}", "  ", fg="red", err=True)
    return bool(report.problems)
