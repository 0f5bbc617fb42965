"""Define ``flax-ckpt shadow-report``; imports are deferred, because the help of all commands loads this module."""

from __future__ import annotations

import click


@click.command()
@click.argument("directory")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a save; seconds, and sizes in bytes.")
def command(directory: str, *, as_json: bool) -> None:
    """Show what shadow mode found in DIRECTORY: differences between the formats, seconds and bytes of each.

    Turn shadow mode on with FLAX_CKPT_COMPAT_SHADOW=true, or config.update(shadow=True): each save then also
    writes the other format, reads both back and compares them.

    Exit code 0 if all saves agree, 1 if some differ or could not be compared, 2 if nothing was recorded.
    """
    from ._shadow_report import show

    show(directory, as_json=as_json)
