"""Define ``flax-ckpt plan``."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from . import _command_base as base


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
def command(path: str, target: str | None, transforms: str | None, html: str | None, **options: Any) -> bool:
    """Preview a restore into your state. Shown is where each leaf would come from, and what would be raised.

    PATH is a checkpoint, or a directory of them. MODULE is imported from the working directory or PYTHONPATH, and
    FUNCTION called without arguments. Arrays are not read. Rules that would find missing leaves are proposed.

    Exit code 0 if flax_ckpt_compat.restore (or restore_checkpoint, with that option) would succeed, 1 if it would
    raise, 2 if there is no plan.
    """
    from flax_ckpt_compat._core.arguments import load_name, load_value
    from flax_ckpt_compat._view import report
    from flax_ckpt_compat._view.plan import plan_restore

    as_flax, as_json = options.pop("as_flax"), options.pop("as_json")
    state, rules = load_value(target) if target else None, load_name(transforms) if transforms else None
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
