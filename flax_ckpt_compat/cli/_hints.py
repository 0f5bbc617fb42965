"""Suggest where checkpoints are when a path has none."""

from __future__ import annotations

import difflib
import itertools
import os
import re

from flax_ckpt_compat._core import module_names, paths
from flax_ckpt_compat._core.errors import CheckpointError
from flax_ckpt_compat._core.escaping import printable
from flax_ckpt_compat._discovery import below

_DIGITS = re.compile(r"\d+")
_MAX_NAMES = 5
_SIMILAR = 0.6  # of difflib; of restores, which have to be sure, more is asked
_MAX_FOLDERS = 200  # a tree of runs may be large, and its disk slow


def next_step(path: str) -> str:
    """Return a sentence about what is near a local path without checkpoints; empty in stores, and for files."""
    try:
        if paths.is_url(path) or os.path.isfile(path):
            return ""
        return _inside(path) if os.path.isdir(path) else _beside(path)
    except (OSError, CheckpointError):
        return ""


def _inside(path: str) -> str:
    folders = itertools.islice(below.folders_below(path), 1, _MAX_FOLDERS)
    found = [folder for folder, checkpoints in folders if checkpoints]
    if found:
        return f"There are checkpoints in {_some(found)}."
    return "Pass a checkpoint, or a directory of checkpoints."


def _beside(path: str) -> str:
    parent = os.path.dirname(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    names = [name for name in os.listdir(parent) if not name.startswith(".")]
    if parent == os.path.dirname(parent) or not names:
        return f"Check the path; {printable(parent, one_line=True)} exists." if parent != "/" else "Check the path."
    missing = os.path.relpath(path, parent).partition(os.sep)[0]
    near = difflib.get_close_matches(missing, names, 1, _SIMILAR)
    if near and _DIGITS.sub("", near[0]) != _DIGITS.sub("", missing):  # of other steps, all are of interest
        return f"Did you mean {printable(os.path.join(parent, near[0]), one_line=True)}?"
    return f"{printable(parent, one_line=True)} has {_some(module_names.natural_sort(names, signed=False))}."


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join([printable(name, one_line=True) for name in names[:_MAX_NAMES]]) + (
        f" and {more} more" if more > 0 else ""
    )
