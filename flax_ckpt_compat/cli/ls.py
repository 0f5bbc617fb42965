"""Define ``flax-ckpt ls``; imports are deferred, because the help of all commands loads this module."""

from __future__ import annotations

import click


@click.command()
@click.argument("directory")
@click.option("--prefix", default="checkpoint_", show_default=True, help="What the names begin with, before the step.")
@click.option("--json", "as_json", is_flag=True, help="A JSON list: sizes in bytes, times in UTC.")
def command(directory: str, prefix: str, as_json: bool) -> None:
    """List the checkpoints in DIRECTORY: a path, or an s3:// or gs:// URL.

    Shows step, format, size, when it was saved, and whether it is complete or why not. Nothing is opened: what
    looks complete may still be damaged. Object stores do not tell when something was saved.

    Exit code 2 if DIRECTORY cannot be listed.
    """
    from ._ls import show

    show(directory, prefix, as_json=as_json)
