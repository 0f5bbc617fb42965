"""Define ``flax-ckpt verify``."""

from __future__ import annotations

import sys

import click

from ._command_base import Command, echo, json_option, path_argument, prefix_option, print_json

_COLORS = {"ok": "green", "unverified": "yellow", "damaged": "red", "unreadable": "yellow"}


@click.command(
    cls=Command,
    examples="""
flax-ckpt verify runs/a                      every checkpoint of a run
flax-ckpt verify runs                        of all runs
flax-ckpt verify runs/a/checkpoint_100       one
flax-ckpt verify gs://bucket/runs --json
""",
)
@path_argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--step", help="Only this step of a directory of checkpoints.")
@prefix_option
@click.option("--strict", is_flag=True, help="Exit with 1 also for leaves without checksums and unexpected files.")
@json_option("a JSON list with a report for each PATH")
def command(paths: tuple[str, ...], step: str | None, prefix: str, *, strict: bool, as_json: bool) -> bool:
    """Read every leaf of checkpoints, and report what is damaged.

    PATH is a checkpoint, or a directory: all checkpoints below it are verified, of every prefix and format. Each leaf
    must decode, with the recorded checksums, shape and dtype. Files that belong to no leaf are listed.

    The verdict is ok where recorded checksums cover every leaf, and hold; unverified where all decodes but some of it
    has no checksums, as in files of Flax itself; else damaged.

    Exit code 1 if anything is damaged or unreadable, 2 if there is no checkpoint at PATH.
    """
    from flax_ckpt_compat._view import verify, verify_report

    from ._progress_bar import progress_shown

    def show(checkpoint: verify_report.VerifiedCheckpoint) -> None:
        if not as_json:
            out = sys.stdout  # above the bar
            echo(verify_report.title(checkpoint), "  ", fg=_COLORS[checkpoint.state], file=out)
            for line in verify_report.details(checkpoint):
                echo(f"  {line}", "    ", file=out)

    with progress_shown(as_json=as_json) as begin:
        places = [verify.checkpoints_at(path, step=step, prefix=prefix) for path in paths]
        count = begin(lambda: sum(one.total_size() for _, found in places for one in found))
        reports = [
            verify.verify_all(root, found, is_named=found == [root] or step is not None, progress=show, count=count)
            for root, found in places
        ]
    if as_json:
        print_json([verify_report.to_json(report) for report in reports])
    else:
        echo(verify_report.summary([one for report in reports for one in report.checkpoints]), "  ")
    return not all(report.verified if strict else not report.damaged for report in reports)
