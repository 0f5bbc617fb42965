"""Define ``flax-ckpt shadow-report``."""

from __future__ import annotations

import click

from ._command_base import Command, echo, json_option, path_argument, print_json


@click.command(
    cls=Command,
    examples="""
FLAX_CKPT_COMPAT_SHADOW=true flax-ckpt run train.py --workdir runs/a
flax-ckpt shadow-report runs/a
""",
)
@path_argument("directory")
@json_option("a JSON list with one object a save; seconds, and sizes in bytes,")
def command(directory: str, *, as_json: bool) -> bool:
    """Show what shadow mode found in DIRECTORY: differences between the formats, seconds and bytes of each.

    Turn shadow mode on with FLAX_CKPT_COMPAT_SHADOW=true, or config.update(shadow=True): each save then also
    writes the other format, reads both back and compares them.

    Exit code 1 if saves differ or could not be compared, 2 if nothing was recorded.
    """
    from flax_ckpt_compat._view.shadow_report import lines, shadow_report

    report = shadow_report(directory)
    if as_json:
        print_json(report.records)
    else:
        echo("\n".join(lines(report)), "  ")
    return not report.is_clean
