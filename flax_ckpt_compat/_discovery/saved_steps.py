"""List the complete checkpoints of exactly one prefix, for overwriting and retention; decode nothing.

Look-ups include more: see `flax_ckpt_compat._discovery.step_lookup`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Container, Iterable, Iterator

from flax_ckpt_compat._core import steps
from flax_ckpt_compat._core.errors import MissingPathError, StorageError
from flax_ckpt_compat._core.location import Location, normal, of_text, resolved
from flax_ckpt_compat._discovery import foreign
from flax_ckpt_compat._discovery.contents import Contents, Layout, State, contents_of
from flax_ckpt_compat._discovery.log_once import log_once

_log = logging.getLogger("flax_ckpt_compat")


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointDir:
    """Directory and prefix of checkpoints, made once of what a caller passed, and handed down."""

    directory: Location
    prefix: str  # beginning of their names: the part of the caller's prefix after its last ``/``
    shown: str  # the directory as the caller wrote it, for returned paths
    root: Location  # what the caller passed, which may be one checkpoint; the prefix may lead from it to the directory
    given_prefix: str  # the caller's prefix

    def path(self, name: str) -> Location:
        """Return the location of a name in this directory."""
        return self.directory / name

    def listed(self) -> CheckpointDir:
        """Return this directory with a listing; see `Location.listed`."""
        return dataclasses.replace(self, directory=self.directory.listed())

    def listed_with(self, other: Location) -> CheckpointDir:
        """Return this directory with the listing of another location, which may be above it."""
        directory, root = (one.with_listing(other.listing) for one in (self.directory, self.root))
        return dataclasses.replace(self, directory=directory, root=root)


def checkpoint_dir(ckpt_dir: str, prefix: str) -> CheckpointDir:
    """Resolve a caller's directory and prefix; raise StorageError for a URL of an unsupported scheme."""
    head, tail = os.path.split(prefix)
    shown = os.path.join(ckpt_dir, head) if head else ckpt_dir
    # ".." out of a symlinked directory can only be resolved by the file system.
    directory = resolved(shown) if os.pardir in head.split(os.sep) else of_text(shown)
    if tail and directory.is_remote:
        normal((directory / tail).path)  # raises for characters that stores do not take
    return CheckpointDir(directory, tail, shown, of_text(ckpt_dir), prefix)


def names_in(checkpoint_dir: CheckpointDir) -> list[str]:
    """Return all names in the directory; none if it does not exist."""
    directory = checkpoint_dir.directory
    try:
        names = directory.listdir()
        return names + directory.restore_set_aside(names)
    except MissingPathError:
        return []


def counted_steps(checkpoint_dir: CheckpointDir, names: list[str], *, with_items: bool = False) -> dict[str, bool]:
    """Return the numeric checkpoints that retention counts, oldest first: name → whether it may remove it.

    Incomplete ones, and what is not a checkpoint of Flax, Orbax or this library, stay uncounted, with a warning. See
    `Contents.may_be_removed` for ``with_items``."""
    counted, broken = dict[str, bool](), []
    checkpoint_dir = checkpoint_dir.listed()
    ours = steps.in_order(names, checkpoint_dir.prefix)
    checkpoint_dir.directory.prefetch(ours, heads=True)
    for name, found in _looked_at(checkpoint_dir, ours):
        if found.counts_for_keep:
            counted[name] = found.may_be_removed(with_items=with_items)
        # Otherwise another process has just evicted it.
        elif found.state in (State.INCOMPLETE, State.DENIED) and found.location.exists():
            broken.append(f"{name} ({found.why})")
    if broken:
        _log.warning("Skipping incomplete checkpoints in %s: %s", checkpoint_dir.directory, "; ".join(broken))
    return counted


def newest_step(checkpoint_dir: CheckpointDir, since: float, *, but: Container[str] = ()) -> str | None:
    """Return the newest complete numeric checkpoint's name that is not in ``but`` or older than ``since``.

    One that may not be listed counts as complete, and nothing that is foreign does."""
    checkpoint_dir, prefix = checkpoint_dir.listed(), checkpoint_dir.prefix
    ours = reversed(steps.in_order(names_in(checkpoint_dir), prefix))
    ours = itertools.takewhile(lambda name: (steps.step_of(name, prefix) or 0) >= since, ours)
    found = _looked_at(checkpoint_dir, (name for name in ours if name not in but))
    return next((name for name, one in found if one.is_complete or one.state is State.DENIED), None)


def _looked_at(checkpoint_dir: CheckpointDir, names: Iterable[str]) -> Iterator[tuple[str, Contents]]:
    """Yield names and what they hold; warn of what is foreign."""
    for name in names:
        found = contents_of(checkpoint_dir.path(name), lists_denied=True)
        if found.state is State.FOREIGN:
            log_once(
                (found.location, "foreign"),
                f"{found.location} is named like a checkpoint, but looks like {found.why}: it stays, is not counted "
                "for keep, and prevents no save of a lower step",
            )
        yield name, found


def is_checkpoint(path: Location) -> bool:
    """Return whether a path is complete and resembles a checkpoint, for suggestions; False if in doubt."""
    try:
        found = contents_of(path)
        is_other = found.layout is Layout.FILE and not foreign.may_be_msgpack_tree(path)
    except StorageError:
        return False
    return found.is_complete and found.is_one_checkpoint and not is_other
