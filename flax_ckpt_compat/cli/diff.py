"""Define ``flax-ckpt diff``."""

from __future__ import annotations

from typing import Any

import click

from . import _command_base as base


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
def command(a: str, b: str, *, as_json: bool, **options: Any) -> bool:
    """Compare the checkpoints A and B, of any formats, leaf by leaf.

    A and B are checkpoints, or directories of them. Shown are leaves of only one of them (- and +), and leaves of
    other types, shapes or values (~). Leaves of numbered layers are folded into one line.

    Exit code 0 if they are the same, 1 if they differ, 2 if they cannot be compared.
    """
    from flax_ckpt_compat._view import diff

    with base.progress_shown(as_json=as_json):
        found = diff.diff(a, b, **options)
    return base.print_report(found._report(), as_json=as_json)
