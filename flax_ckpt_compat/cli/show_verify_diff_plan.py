"""Define the commands that look into checkpoints: ``flax-ckpt show``, ``verify``, ``diff`` and ``plan``."""

from __future__ import annotations

import dataclasses
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
def show(path: str, depth: int | None, html: str | None, *, stats: bool, as_json: bool, **options: Any) -> None:
    """Show the tree of the checkpoint PATH. Types, sizes and saved shardings of its leaves are listed, and totals.

    PATH is a checkpoint, or a directory of them. Equal subtrees of numbered layers are folded into one. Sizes are
    those in memory. Arrays are not read, except for --stats, which needs little memory.

    Exit code 2 if the checkpoint cannot be read, or no leaf matches.
    """
    from flax_ckpt_compat._view import report
    from flax_ckpt_compat._view import show as tree

    found = tree.choose_leaves(path, stats=stats, **options)
    if html is None or as_json:
        base.print_report(tree.report(found, depth), as_json=as_json)
    if html is not None:
        report.write_page(html, tree.title(found), [tree.treemap(found), report.html(tree.report(found, depth))])
        click.echo(f"Wrote {html}.", err=True)


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
def verify(paths: tuple[str, ...], step: str | None, prefix: str, *, strict: bool, as_json: bool) -> bool:
    """Read every leaf of checkpoints, and report what is damaged.

    PATH is a checkpoint, or a directory: all checkpoints below it are verified, of every prefix and format. Each leaf
    must decode, with the recorded checksums, shape and dtype. Files that belong to no leaf are listed.

    The verdict is ok where recorded checksums cover every leaf, and hold; unverified where all decodes but some of it
    has no checksums, as in files of Flax itself; else damaged.

    Exit code 1 if anything is damaged or unreadable, 2 if there is no checkpoint at PATH.
    """
    from flax_ckpt_compat._view import verify as checks

    show_one = None if as_json else lambda checkpoint: base.print_lines(checks.lines_of(checkpoint))
    with base.progress_shown(as_json=as_json):
        found = [checks.verify(path, step=step, prefix=prefix, progress=show_one) for path in paths]
    for one in found if step is None else ():
        base.tell_passed_over(one.path, {checkpoint.path for checkpoint in one.checkpoints})
    return base.print_report(checks.report(found, strict=strict), as_json=as_json)


@base.command("""
flax-ckpt diff runs/a/checkpoint_100 runs/a/checkpoint_200
flax-ckpt diff runs/a runs/b                        the latest of each
flax-ckpt diff old.msgpack new/checkpoint_1         across formats
flax-ckpt diff runs/a runs/b --step 7 --rtol 1e-5
""")
@base.path_argument("a")
@base.path_argument("b")
@base.checkpoint_options
@click.option("--rtol", type=float, help="Let values differ by atol + rtol * |b|. Without both, bits are compared.")
@click.option("--atol", type=float, help="See --rtol. With a tolerance, 0 included, 0.0 equals -0.0, and NaN NaN.")
@base.json_option("a JSON object with all differences")
def diff(a: str, b: str, *, as_json: bool, **options: Any) -> bool:
    """Compare the checkpoints A and B, of any formats, leaf by leaf.

    A and B are checkpoints, or directories of them. Shown are leaves of only one of them (- and +), and leaves of
    other types, shapes or values (~). Leaves of numbered layers are folded into one line.

    Exit code 0 if they are the same, 1 if they differ, 2 if they cannot be compared.
    """
    from flax_ckpt_compat._view.diff import diff as compare

    with base.progress_shown(as_json=as_json):
        found = compare(a, b, **options)
    return base.print_report(found._report(), as_json=as_json)


@base.command("""
flax-ckpt plan runs/a --target train:create_state
flax-ckpt plan runs/a --target train:create_state --transforms train:RULES
flax-ckpt plan runs/a --step 100 --target train:abstract_state --json
""")
@base.path_argument("path")
@click.option("--target", metavar="MODULE:FUNCTION", help="Returns the state to restore into; may be abstract.")
@click.option("--transforms", metavar="MODULE:NAME", help="Rules or transforms to restore with.")
@click.option("--restore-checkpoint", "as_flax", is_flag=True, help="Preview restore_checkpoint instead of restore.")
@click.option("--html", metavar="FILE", type=base.FilePath(), help="Write the plan as a page of HTML instead.")
@base.checkpoint_options
@base.json_option("a JSON object with a row for each leaf")
def plan(path: str, target: str | None, transforms: str | None, html: str | None, **options: Any) -> bool:
    """Preview a restore into your state. Shown is where each leaf would come from, and what would be raised.

    PATH is a checkpoint, or a directory of them. MODULE is imported from the working directory or PYTHONPATH, and
    FUNCTION called without arguments. Arrays are not read. Rules that would find missing leaves are proposed.

    Exit code 0 if flax_ckpt_compat.restore (or restore_checkpoint, with that option) would succeed, 1 if it would
    raise, 2 if there is no plan.
    """
    from flax_ckpt_compat._restore.call_arguments import loaded
    from flax_ckpt_compat._view import report
    from flax_ckpt_compat._view.plan import plan_restore

    as_flax, as_json = options.pop("as_flax"), options.pop("as_json")
    state, rules = loaded(target or None, transforms or None)
    policies = _policies_of_flax(rules) if as_flax else {}
    found = plan_restore(path, state, transforms=rules, **options, **policies)
    if as_flax:
        found = dataclasses.replace(found, function="restore_checkpoint", flax_succeeds=False)
    if html is not None:
        report.write_page(html, found.path, [report.html(found._report())])
        click.echo(f"Wrote {html}.", err=True)
        return found.raises is not None
    return base.print_report(found._report(), as_json=as_json)


def _policies_of_flax(rules: Any) -> dict[str, Any]:
    """Return the arguments with which a plan previews ``restore_checkpoint``: its settings, and Orbax's leniency."""
    from flax_ckpt_compat import config
    from flax_ckpt_compat._restore.transform_spec import TransformSpec

    names = ("missing_leaves", "shape_mismatch", "kind_mismatch", "must_exist")
    policies = {name: getattr(config.current(), name) for name in names}
    return {**policies, "missing_leaves": "ignore"} if TransformSpec(rules).lenient else policies
