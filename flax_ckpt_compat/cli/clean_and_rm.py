"""Define ``flax-ckpt clean`` and ``flax-ckpt rm``: list what would go, ask, and remove it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from flax_ckpt_compat._core.errors import CheckpointNotFoundError, StorageError, UnrecognizedFormatError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.text_formatting import counted, format_size, printable
from flax_ckpt_compat._discovery import contents, locating, saved_steps, steps, walk
from flax_ckpt_compat._discovery.contents import State
from flax_ckpt_compat._view.report import Line, Report

from . import _command_base as base

if TYPE_CHECKING:
    from flax_ckpt_compat._save.interrupted_saves import Leftover

_dry_run = click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
_yes = click.option("--yes", is_flag=True, help="Do not ask.")


@base.command("""
flax-ckpt clean runs/a --dry-run
flax-ckpt clean runs                 asks before it removes anything
flax-ckpt clean gs://bucket/runs --yes
flax-ckpt clean runs --force         also of today, if nothing saves here
""")
@base.path_argument("directory")
@_dry_run
@_yes
@click.option("--force", is_flag=True, help="Also what was changed within 24 hours: nothing may be saving here.")
@base.json_option("a JSON list of what there is")
def clean(directory: str, *, dry_run: bool, yes: bool, force: bool, as_json: bool) -> bool:
    """Remove what interrupted saves left in DIRECTORY and below it.

    That is: temporaries of dead writers, unfinished uploads, and the arrays of several processes (_gda) without their
    checkpoint. Files that a running job may still need are kept: of real Flax and Orbax, and of other machines, all
    that changed within 24 hours, unless you pass --force. No checkpoint is ever removed.

    Exit code 0 if nothing is left, 1 if something is (after --dry-run, a no, or where the system refused), 2 if
    DIRECTORY cannot be listed.
    """
    from flax_ckpt_compat._save import interrupted_saves

    found = interrupted_saves.find_leftovers(location_of(directory))
    going = [one for one in found if not one.kept or (force and one.by_time)]
    value = [{"path": one.location.path, "what": one.what, "nbytes": one.nbytes, "kept": one.kept} for one in found]
    base.print_report(Report(_leftovers(found, going), lambda: value), as_json=as_json)
    remove = functools.partial(interrupted_saves.remove, force=force)
    return bool(going) and _remove_all(going, remove, yes=yes, dry_run=dry_run, as_json=as_json)


def _leftovers(found: Sequence[Leftover], going: Sequence[Leftover]) -> Iterator[Line]:
    """Yield what there is, and how much of it goes."""
    for one in found:
        note = f"; stays, because {one.kept}" if one not in going else f", although {one.kept}" if one.kept else ""
        yield Line(f"{format_size(one.nbytes):>8}  {printable(one.what, one_line=True)}{note}", hang=10)
        yield Line(f"{'':10}{printable(one.location.path, one_line=True)}")
    yield Line(f"{len(going)} to remove, {format_size(sum(one.nbytes for one in going))}.")
    if protected := sum(one.nbytes for one in found if one.by_time and one not in going):
        yield Line(f"--force removes {format_size(protected)} more, which only time protects, if nothing saves here.")


@base.command("""
flax-ckpt rm runs/a/checkpoint_100
flax-ckpt rm runs/a runs/b --step 100 --dry-run
flax-ckpt rm gs://bucket/runs/a --step 100 --step 200 --yes
""")
@base.path_argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--step", "chosen", multiple=True, help="Remove this step of each PATH, a directory; repeatable.")
@base.prefix_option
@_dry_run
@_yes
def rm(paths: tuple[str, ...], chosen: tuple[str, ...], prefix: str, *, dry_run: bool, yes: bool) -> bool:
    """Remove checkpoints, whole. The arrays of several processes (_gda) beside them go, too.

    PATH is a checkpoint, complete or not, or, with --step, a directory of checkpoints. A crash in the middle leaves no
    half checkpoint. What is no checkpoint of Flax or Orbax is refused, and so is a directory of checkpoints.

    Exit code 0 if all are removed, 1 if one is left, after --dry-run or a no; 2 if one is refused, and none is removed.
    """
    found: dict[str, Location] = {}
    for path in paths:
        checkpoint_dir = saved_steps.checkpoint_dir(path, prefix)
        located = (locating.find(checkpoint_dir, step) for step in chosen)  # raises for a step that is not there
        named = [one.location.unlisted() for one in located if isinstance(one, locating.LocatedCheckpoint)]
        found |= {one.path: _checked(one) for one in named or [location_of(path)]}
    sizes = [one.total_size() + one.sibling(steps.ARRAYS_POSTFIX).total_size() for one in found.values()]
    for location, nbytes in zip(found.values(), sizes, strict=True):
        base.echo(f"{format_size(nbytes):>8}  {printable(location.path, one_line=True)}")
    base.echo(f"{counted(len(found), 'checkpoint')} to remove, {format_size(sum(sizes))}.")
    return _remove_all(list(found.values()), _remove, yes=yes, dry_run=dry_run)


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
        raise CheckpointNotFoundError(f"{location} does not exist; pass a checkpoint", path=location.path)
    why = f"is no checkpoint of Flax or Orbax{f' ({found.why})' if found.why else ''}: delete it by other means"
    parent = contents.contents_of(folder)
    is_item = location.name in parent.items and (parent.is_marked or steps.split_step(folder.name))
    if is_item or location.name.endswith(steps.ARRAYS_POSTFIX):
        why = "is a part of a checkpoint: pass that"
    elif location.isdir() and any(one.path != location.path for one in walk.checkpoints_below(location)):
        why = "is a directory of checkpoints: pass those to remove, or --step"
    elif found.state is State.TEMPORARY:
        why = "is what an interrupted save left: flax-ckpt clean removes it"
    elif found.is_certain or (found.state is State.INCOMPLETE and steps.split_step(location.name)):
        return location
    raise UnrecognizedFormatError(f"{location} {why}", path=location.path)


def _remove_all(
    found: Sequence[Any], remove: Callable[[Any], bool], *, yes: bool, dry_run: bool, as_json: bool = False
) -> bool:
    """Remove what was listed, each by itself, if the user says so; return whether any is left."""
    if not (dry_run or yes) and (as_json or not base.is_terminal(sys.stdin)):
        raise base.FailedError("nothing was removed, because there is no terminal to ask on: pass --yes or --dry-run")
    if dry_run or not (yes or click.confirm("Remove them?")):
        return True
    left = 0
    for one in found:
        try:
            left += not remove(one)
        except StorageError as error:
            left += 1
            base.echo(f"Error: {error}", err=True)
    base.echo(f"Removed {len(found) - left} of {len(found)}.", err=as_json)
    return left > 0
