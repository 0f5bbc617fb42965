"""Define ``flax-ckpt verify``."""

from __future__ import annotations

import click

from . import _command_base as base


@base.command("""
flax-ckpt verify runs/a                      every checkpoint of a run
flax-ckpt verify runs                        of all runs
flax-ckpt verify runs/a/checkpoint_100       one
flax-ckpt verify gs://bucket/runs --json
""")
@base.path_argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--step", help="Only this step of a directory of checkpoints.")
@base.prefix_option
@click.option("--strict", is_flag=True, help="Exit with 1 also for leaves without checksums and unexpected files.")
@base.json_option("a JSON list with a report for each PATH")
def command(paths: tuple[str, ...], step: str | None, prefix: str, *, strict: bool, as_json: bool) -> bool:
    """Read every leaf of checkpoints, and report what is damaged.

    PATH is a checkpoint, or a directory: all checkpoints below it are verified, of every prefix and format. Each leaf
    must decode, with the recorded checksums, shape and dtype. Files that belong to no leaf are listed.

    The verdict is ok where recorded checksums cover every leaf, and hold; unverified where all decodes but some of it
    has no checksums, as in files of Flax itself; else damaged.

    Exit code 1 if anything is damaged or unreadable, 2 if there is no checkpoint at PATH.
    """
    from flax_ckpt_compat._view import verify

    show_one = None if as_json else lambda checkpoint: base.print_lines(verify.lines_of(checkpoint))
    with base.progress_shown(as_json=as_json):
        found = [verify.verify(path, step=step, prefix=prefix, progress=show_one) for path in paths]
    for one in found if step is None else ():
        base.tell_passed_over(one.path, {checkpoint.path for checkpoint in one.checkpoints})
    return base.print_report(verify.report(found, strict=strict), as_json=as_json)
