"""Suggest where checkpoints are when a path has none: further down than the errors look."""

from __future__ import annotations

import itertools

from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import hints, walk

_MAX_FOLDERS = 200  # a tree of runs may be large, and its disk slow


def next_step(location: Location, for_below: str = "") -> str:
    """Return a sentence about what is near a local location without checkpoints; empty in stores, and for files.

    It ends with ``for_below`` if there are checkpoints below the path."""
    try:
        if location.is_remote or location.isfile():
            return ""
        if location.isdir():
            return _inside(location, for_below)
    except (OSError, CheckpointError):
        return ""
    beside = hints.beside(location)
    return beside[0].upper() + beside[1:] + ("" if beside.endswith("?") else ".") if beside else ""


def _inside(location: Location, for_below: str) -> str:
    folders = itertools.islice(walk.folders_below(location, []), 1, _MAX_FOLDERS)
    found = [folder.path for folder, checkpoints in folders if checkpoints]
    if found:
        return f"There are checkpoints in {hints.some(found)}{for_below}."
    return "Pass a checkpoint, or a directory of checkpoints."
