"""Define ``flax-ckpt convert``."""

from __future__ import annotations

from typing import Any

import click

from ._command_base import Command, json_option, path_argument

_EXAMPLES = """
flax-ckpt convert runs/a/checkpoint_7 a7 --to orbax
flax-ckpt convert runs runs_orbax --to orbax --dry-run
flax-ckpt convert runs runs_orbax --to orbax --workers 4 --resume
flax-ckpt convert runs s3://bucket/runs --to manager --target train:make_state
flax-ckpt convert best_model runs_orbax --to manager --step 5
flax-ckpt convert runs/5 model --to msgpack --item state
flax-ckpt convert runs/5 out --to manager --step 5 --item state=default
flax-ckpt convert runs runs_orbax --to v1 --shard $SLURM_ARRAY_TASK_ID/16
"""


def _shard(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    first, _slash, last = value.partition("/")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise click.BadParameter("expected I/N with 0 <= I < N, such as 0/16")
    return int(first), int(last)


@click.command(cls=Command, examples=_EXAMPLES)
@path_argument("src")
@path_argument("dst")
@click.option(
    "--to",
    required=True,
    type=click.Choice(["orbax", "msgpack", "manager", "v1", "safetensors"]),
    help="What to write: Orbax directories, msgpack files, steps of a CheckpointManager, steps of Orbax v1's "
    "training.Checkpointer, or safetensors files.",
)
@click.option(
    "--step",
    "steps",
    multiple=True,
    help="Only this step; repeat it for more.  [default: all] If SRC is one checkpoint: the number of the step that it "
    "becomes, also of one whose name has none.",
)
@click.option(
    "--item",
    "items",
    multiple=True,
    metavar="NAME[=NEW]",
    help="Only this item, under a new name if given; repeatable.",
)
@click.option(
    "--sharding",
    type=click.Choice(["drop", "keep"]),
    default="drop",
    show_default=True,
    help="drop: results restore on any machine. keep: they record the devices of the source.",
)
@click.option("--all", "every", is_flag=True, help="All checkpoints, as without --step.")
@click.option("--target", metavar="MODULE:FUNCTION", help="Function that returns the saved state, for its containers.")
@click.option("--transforms", metavar="MODULE:NAME", help="Rules or transforms to apply, with the target's structure.")
@click.option("--dry-run", is_flag=True, help="Show what would be done, and write nothing.")
@click.option("--resume", is_flag=True, help="Keep results that are there and equal to their sources.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Checkpoints at the same time.")
@click.option("--dask", metavar="ADDRESS", help="Run on the workers of this Dask scheduler, which see the same paths.")
@click.option("--shard", metavar="I/N", callback=_shard, help="Every N-th checkpoint from the I-th, counted from 0.")
@json_option("a list with source, destination, status, leaves, bytes, seconds, notes and error of each")
def command(src: str, dst: str, **options: Any) -> bool:
    """Convert SRC, one checkpoint or all below a directory, to DST, and never touch SRC.

    For one checkpoint DST is the path of the result, else the directory of the results, which lie in it as below
    SRC; for the steps of a manager it is the manager's directory. Nothing in DST is replaced.

    Each result is read back and compared with its source before it gets its name. An interrupted conversion
    leaves no half results: run it again with --resume. Memory: the largest array of each checkpoint that is
    converted at the same time, besides buffers.

    A msgpack file stores lists and tuples as dicts with the keys 0, 1, …. These become lists, with a
    warning; --target gives the containers that the state has.

    Exit code 0: all converted. 1: some could not be. 2: refused. 130: interrupted.
    """
    if options.pop("every") and options["steps"]:
        raise click.UsageError("--all and --step contradict each other; leave one out")
    pairs = [(name, new, equals) for name, equals, new in (text.partition("=") for text in options.pop("items"))]
    if bad := [name for name, new, equals in pairs if not name or (equals and not new)]:
        raise click.UsageError(f"--item takes NAME or NAME=NEW, not {bad[0]}=")
    items = {name: new for name, new, _ in pairs} or None
    from ._convert import run

    return run(src, dst, items=items, **options)
