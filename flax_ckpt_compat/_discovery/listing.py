"""The complete checkpoints of exactly one prefix, by which saving overwrites and retains; decodes nothing.

What look-ups name is more than that: see `flax_ckpt_compat._discovery.directory`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Container

from flax_ckpt_compat._core import paths, steps
from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.local import atomic
from flax_ckpt_compat._core.object_store import client
from flax_ckpt_compat._discovery import detect, file_types

_log = logging.getLogger("flax_ckpt_compat")


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointDir:
    """Where the checkpoints of a prefix live.

    Attributes:
        directory: absolute path of the directory that holds them.
        prefix: what their names begin with; the part of the caller's prefix after its last ``/``.
        shown: the directory as the caller wrote it, for returned paths.
    """

    directory: str
    prefix: str
    shown: str

    def path(self, name: str) -> str:
        """Absolute path of a name in this place."""
        return os.path.join(self.directory, name)


def checkpoint_dir(ckpt_dir: str, prefix: str) -> CheckpointDir:
    """The place that a caller's directory and prefix mean.

    Raises:
        StorageError: a URL of a scheme that cannot be reached, or what was one.
    """
    head, tail = os.path.split(prefix)
    shown = os.path.join(ckpt_dir, head) if head else ckpt_dir
    # Where the prefix climbs out of a linked directory, only the file system knows where to.
    climbs = os.pardir in head.split(os.sep) and not paths.is_url(shown)
    absolute = os.path.realpath(paths.local(shown)) if climbs else paths.absolute(shown)
    return CheckpointDir(absolute, tail, shown)


def names_in(where: CheckpointDir) -> list[str]:
    """All names in the place's directory; none where it does not exist."""
    try:
        with atomic.translated(where.directory):
            names = paths.listdir(where.directory)
        return names if paths.is_url(where.directory) else names + atomic.restore_set_aside(where.directory, names)
    except StorageError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return []
        raise


def complete_steps(where: CheckpointDir, names: list[str] | None = None, *, quiet: bool = False) -> list[str]:
    """Names of the complete numeric checkpoints, oldest first; incomplete ones are named in one warning.

    Args:
        where: directory and prefix.
        names: what the directory holds, where the caller knows that.
        quiet: do without the warning.
    """
    complete, broken = [], []
    with paths.listing_cache(where.directory):
        ours = steps.in_order(names_in(where) if names is None else names, where.prefix)
        if paths.is_url(where.directory):
            client.prefetch_emptiness([where.path(name) for name in ours if paths.isfile(where.path(name))])
        for name in ours:
            missing = what_is_missing(where.path(name))
            if missing is None:
                complete.append(name)
            # Else another process has just evicted it, or it is no checkpoint and nobody's to count.
            elif paths.lexists(where.path(name)) and not detect.foreign_look(where.path(name)):
                broken.append(f"{name} ({missing})")
    if broken and not quiet:
        _log.warning("Skipping incomplete checkpoints in %s: %s", where.directory, "; ".join(broken))
    return complete


def newest_step(where: CheckpointDir, *, but: Container[str] = ()) -> str | None:
    """Return the name of the newest complete numeric checkpoint; nothing is asked about older ones.

    Args:
        where: directory and prefix.
        but: names that do not count.
    """
    with paths.listing_cache(where.directory):
        for name in reversed(steps.in_order(names_in(where), where.prefix)):
            if name not in but and what_is_missing(where.path(name)) is None:
                return name
    return None


def what_is_missing(path: str) -> str | None:
    """Why a checkpoint is certainly not complete, or None; one that others remove meanwhile is not there.

    Raises:
        StorageError: it cannot be looked at.
    """
    try:
        with atomic.translated(path):
            return detect.what_is_missing(path)
    except StorageError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return "it does not exist"
        raise


def is_checkpoint(path: str) -> bool:
    """True for what is complete and resembles a checkpoint, judged to make a suggestion; False where in doubt."""
    try:
        with atomic.translated(path):
            of_its_kind = detect.is_orbax_directory(path) if paths.isdir(path) else file_types.may_be_msgpack_tree(path)
            return detect.what_is_missing(path) is None and of_its_kind
    except StorageError:
        return False
