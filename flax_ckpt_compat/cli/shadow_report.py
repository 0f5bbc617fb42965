"""Define ``flax-ckpt shadow-report``; imports are deferred, because the help of all commands loads this module."""

from __future__ import annotations

import click

from ._commands import Command, json_option


@click.command(cls=Command, examples="flax-ckpt shadow-report runs/a")
@click.argument("directory")
@json_option("a JSON list with an object for each save, with seconds, and sizes in bytes,")
def command(directory: str, *, as_json: bool) -> None:
    """Show what shadow mode found in DIRECTORY: differences between the formats, seconds and bytes of each.

    Turn shadow mode on with FLAX_CKPT_COMPAT_SHADOW=true, or config.update(shadow=True): each save then also
    writes the other format, reads both back and compares them.

    Exit code 0 if all saves agree, 1 if some differ or could not be compared, 2 if nothing was recorded.
    """
    from ._shadow_report import show

    show(directory, as_json=as_json)
