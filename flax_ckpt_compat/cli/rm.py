"""Define ``flax-ckpt rm``."""

from __future__ import annotations

import click

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.errors import CheckpointNotFoundError, UnrecognizedFormatError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.location import Location, of_text
from flax_ckpt_compat._core.text_formatting import counted, format_size, printable
from flax_ckpt_compat._discovery import contents, locating, saved_steps, walk
from flax_ckpt_compat._discovery.contents import State

from ._command_base import Command, echo, may_remove, path_argument, prefix_option, remove_all


@click.command(
    cls=Command,
    examples="""
flax-ckpt rm runs/a/checkpoint_100
flax-ckpt rm runs/a runs/b --step 100 --dry-run
flax-ckpt rm gs://bucket/runs/a --step 100 --step 200 --yes
""",
)
@path_argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--step", "chosen", multiple=True, help="Remove this step of each PATH, a directory; repeatable.")
@prefix_option
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(paths: tuple[str, ...], chosen: tuple[str, ...], prefix: str, *, dry_run: bool, yes: bool) -> bool:
    """Remove checkpoints whole, with the arrays of several processes (_gda) beside them.

    PATH is a checkpoint, complete or not, or, with --step, a directory of checkpoints. A crash in the middle leaves no
    half checkpoint. What is no checkpoint of Flax or Orbax is refused, and so is a directory of checkpoints.

    Exit code 0 if all are removed, 1 if one is left, after --dry-run or a no; 2 if one is refused, and none is removed.
    """
    found: dict[str, Location] = {}
    for path in paths:
        checkpoint_dir = saved_steps.checkpoint_dir(path, prefix)
        located = (locating.find(checkpoint_dir, step) for step in chosen)  # raises for a step that is not there
        named = [one.location.unlisted() for one in located if isinstance(one, locating.LocatedCheckpoint)]
        found |= {one.path: _checked(one) for one in named or [of_text(path)]}
    sizes = [one.total_size() + one.sibling(steps.ARRAYS_POSTFIX).total_size() for one in found.values()]
    for location, nbytes in zip(found.values(), sizes, strict=True):
        echo(f"{format_size(nbytes):>8}  {printable(location.path, one_line=True)}")
    echo(f"{counted(len(found), 'checkpoint')} to remove, {format_size(sum(sizes))}.")
    if not may_remove(yes=yes, dry_run=dry_run):
        return True
    return remove_all(list(found.values()), _remove)


def _remove(location: Location) -> bool:
    """Remove a checkpoint and its arrays; without its file, no checkpoint is there."""
    folder = location.parent
    if not folder.is_remote:  # else the next look-up puts an older version back
        atomic.remove_set_aside(folder.path, folder.listdir(), [location.name])
    for name in (location.name, location.name + steps.ARRAYS_POSTFIX):
        for failure in folder.discard([name] if (folder / name).exists() else []).values():
            raise failure
    return True


def _checked(location: Location) -> Location:
    """Return a location if it is certainly one checkpoint; else raise."""
    folder = location.parent
    if not folder.is_remote and folder.isdir():
        folder.restore_set_aside(folder.listdir())
    found = contents.contents_of(location)
    if found.state is State.ABSENT:
        raise CheckpointNotFoundError(f"{location} does not exist", path=location.path)
    why = f"is no checkpoint of Flax or Orbax{f' ({found.why})' if found.why else ''}: delete it by other means"
    parent = contents.contents_of(folder)
    is_item = location.name in parent.items and (parent.is_marked or steps.ends_in_step(parent.name))
    if is_item or location.name.endswith(steps.ARRAYS_POSTFIX):
        why = "is a part of a checkpoint: pass that"
    elif location.isdir() and any(one.path != location.path for one in walk.checkpoints_below(location)):
        why = "is a directory of checkpoints: pass those to remove, or --step"
    elif found.state is State.TEMPORARY:
        why = "is what an interrupted save left: flax-ckpt clean removes it"
    elif found.is_certain or (found.state is State.INCOMPLETE and steps.ends_in_step(location.name)):
        return location
    raise UnrecognizedFormatError(f"{location} {why}", path=location.path)
