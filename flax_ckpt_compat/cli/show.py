"""Define ``flax-ckpt show``."""

from __future__ import annotations

from typing import Any

import click

from ._command_base import (
    Command,
    FilePath,
    checkpoint_options,
    json_option,
    path_argument,
    print_report,
    progress_shown,
)


@click.command(
    cls=Command,
    examples="""
flax-ckpt show runs/a                               the latest checkpoint
flax-ckpt show runs/a/checkpoint_100 --depth 2
flax-ckpt show runs/a --filter 'block_[01]/kernel'
flax-ckpt show runs/a --stats                       find NaNs
flax-ckpt show runs/a --html sizes.html
flax-ckpt show gs://bucket/runs/a --json
""",
)
@path_argument("path")
@checkpoint_options
@click.option("--depth", type=click.IntRange(min=1), help="Show this number of levels; deeper ones are summed up.")
@click.option(
    "--filter",
    "pattern",
    metavar="REGEX",
    help="Show only leaves whose key path it matches: whole names, anywhere, or from the root with ^, as in rules.",
)
@click.option("--stats", is_flag=True, help="Read all values: min, max and mean of the finite ones; NaN, inf: counts.")
@click.option(
    "--html",
    metavar="FILE",
    type=FilePath(),
    help="Write a page instead: a treemap of sizes above the tree. Needs plotly.",
)
@json_option("a JSON object with all leaves")
def command(path: str, depth: int | None, html: str | None, *, stats: bool, as_json: bool, **options: Any) -> None:
    """Show the tree of the checkpoint PATH: types, sizes and saved shardings of its leaves, and totals.

    PATH is a checkpoint, or a directory of them. Equal subtrees of numbered layers are folded into one. Sizes are
    those in memory. Arrays are not read, except for --stats, which needs little memory.

    Exit code 2 if the checkpoint cannot be read, or no leaf matches.
    """
    from flax_ckpt_compat._view import report, show

    with progress_shown(as_json=as_json or not stats) as begin:
        found = show.contents(path, stats=stats, begin=begin, **options)
    if html is None or as_json:
        print_report(show.report(found, depth), as_json=as_json)
    if html is not None:
        report.write_page(html, show.title(found), [show.treemap(found), report.html(show.report(found, depth))])
        click.echo(f"Wrote {html}.", err=True)
