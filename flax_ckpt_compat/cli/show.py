"""Define ``flax-ckpt show``."""

from __future__ import annotations

from typing import Any

import click

from . import _command_base as base


@base.command("""
flax-ckpt show runs/a                               the latest checkpoint
flax-ckpt show runs/a/checkpoint_100 --depth 2
flax-ckpt show runs/a --filter 'block_[01]/kernel'
flax-ckpt show runs/a --stats                       find NaNs
flax-ckpt show runs/a --html sizes.html
flax-ckpt show gs://bucket/runs/a --json
""")
@base.path_argument("path")
@base.checkpoint_options
@click.option("--depth", type=click.IntRange(min=1), help="Show this number of levels; deeper ones are summed up.")
@click.option("--filter", "pattern", metavar="REGEX", help="Only leaves whose key path it matches, as in rules.")
@click.option("--stats", is_flag=True, help="Read all values: min, max and mean of the finite ones; NaN, inf: counts.")
@click.option("--html", metavar="FILE", type=base.FilePath(), help="Write a page with a treemap instead; needs plotly.")
@base.json_option("a JSON object with all leaves")
def command(path: str, depth: int | None, html: str | None, *, stats: bool, as_json: bool, **options: Any) -> None:
    """Show the tree of the checkpoint PATH. Types, sizes and saved shardings of its leaves are listed, and totals.

    PATH is a checkpoint, or a directory of them. Equal subtrees of numbered layers are folded into one. Sizes are
    those in memory. Arrays are not read, except for --stats, which needs little memory.

    Exit code 2 if the checkpoint cannot be read, or no leaf matches.
    """
    from flax_ckpt_compat._view import report, show

    found = show.contents(path, stats=stats, **options)
    if html is None or as_json:
        base.print_report(show.report(found, depth), as_json=as_json)
    if html is not None:
        report.write_page(html, show.title(found), [show.treemap(found), report.html(show.report(found, depth))])
        click.echo(f"Wrote {html}.", err=True)
