"""Define ``flax-ckpt ls``; imports are deferred, because the help of all commands loads this module."""

from __future__ import annotations

import click

from ._command_base import Command, json_option, path_argument, prefix_option


@click.command(
    cls=Command,
    short_help="List the checkpoints in a directory.",
    examples="""
flax-ckpt ls runs/a
flax-ckpt ls runs --recursive
flax-ckpt ls runs/a --prefix model_ --leaves
flax-ckpt ls gs://bucket/runs/a --json
""",
)
@path_argument("directory")
@prefix_option
@click.option("-r", "--recursive", is_flag=True, help="List all directories below too, with checkpoints of any prefix.")
@click.option("--leaves", is_flag=True, help="Open each checkpoint and count its leaves.")
@json_option("a JSON list, with sizes in bytes and times in UTC")
def command(directory: str, prefix: str, *, recursive: bool, leaves: bool, as_json: bool) -> None:
    """List the checkpoints in DIRECTORY: a path, or an s3:// or gs:// URL.

    Shows step, format, size, when it was saved, and whether it is complete or why not; then, apart, what is
    no checkpoint despite its name, and what interrupted saves left. Without --leaves nothing is opened: what looks
    complete may still be damaged. Object stores give no times.

    Exit code 2 if DIRECTORY cannot be listed.
    """
    from ._ls import show

    show(directory, prefix, recursive=recursive, leaves=leaves, as_json=as_json)
