"""Find the checkpoint that a directory lies in, with which it would be removed or replaced."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import suppress

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._core.thread_pools import results_of
from flax_ckpt_compat._discovery import contents
from flax_ckpt_compat._discovery.orbax_trees import MARKERS


def why_inside(path: Location) -> str | None:
    """Return why nothing is saved to a path that lies in a checkpoint in Orbax's format; None if it lies in none.

    The path need not exist."""
    if (around := checkpoint_around(path)) is None:
        return None
    outside = f"pass a directory outside of it, such as {around.parent}"
    return f"{around} is a checkpoint, and would be removed with all in it; {outside}"


def checkpoint_around(path: Location) -> Location | None:
    """Return the checkpoint in Orbax's format that a path lies in, or None."""
    parent = path.at(path.resolve()).parent.unlisted()
    if path.is_remote:
        return _around_in_store(parent)
    marked = (folder for folder in _upwards(parent) if any(_is_there(folder, name) for name in MARKERS))
    return next(filter(_is_checkpoint, marked), None)


@functools.lru_cache(maxsize=64)  # a request for each folder and marker
def _around_in_store(url: Location) -> Location | None:
    found = results_of(lambda place: _is_there(*place), list(itertools.product(_upwards(url), MARKERS)))
    marked = {folder for (folder, _), is_there in found.items() if is_there}
    return next(filter(_is_checkpoint, sorted(marked, key=lambda folder: len(folder.path), reverse=True)), None)


def _upwards(folder: Location) -> Iterator[Location]:
    """Yield a folder and all above it that can be checkpoints."""
    while folder.path.strip("/") and folder.can_hold_checkpoint():
        yield folder
        folder = folder.parent


def _is_there(folder: Location, marker: str) -> bool:
    """Return whether a folder has a marker, without listing the folder; False where a look is refused."""
    with suppress(StorageError):
        return (folder / marker).isfile()
    return False


def _is_checkpoint(folder: Location) -> bool:
    with suppress(StorageError, OSError):
        return contents.is_certainly_orbax(folder)
    return False
