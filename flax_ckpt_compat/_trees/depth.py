"""Limit the depth of trees to what a restore into a target can handle within Python's recursion limit."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from flax_ckpt_compat._core.errors import CheckpointError, DepthError

# Calls that Flax's own functions, and so a restore, nest per level, and fixed calls (measured: 3 and 17).
_CALLS_A_LEVEL = 3
_CALLS_BESIDE = 40
_NEVER_TOO_DEEP = 50
_REMEDY = "Flatten the tree, or raise the limit with sys.setrecursionlimit, before saving and before restoring"


def check(levels: int, path: str) -> None:
    """Raise DepthError for a save of a tree too deep to be restored from the current call depth."""
    if levels <= _NEVER_TOO_DEEP:
        return
    calls = sum(1 for _ in traceback.walk_stack(sys._getframe()))
    most = (sys.getrecursionlimit() - calls - _CALLS_BESIDE) // _CALLS_A_LEVEL
    if levels > most:
        raise DepthError(
            f"cannot save to {path}: the tree has {levels} levels, and a restore of more than {most} would exceed "
            f"Python's recursion limit ({sys.getrecursionlimit()}). {_REMEDY}",
            path=path,
        )


@contextmanager
def limited(doing: str) -> Iterator[None]:
    """Translate a RecursionError, in a ``with`` block or a decorated function; ``doing`` completes "cannot be …"."""
    try:
        yield
    except RecursionError as error:
        if isinstance(error, CheckpointError):
            raise
        raise DepthError(
            f"the tree is nested too deeply, or contains itself, and cannot be {doing} within Python's recursion limit "
            f"({sys.getrecursionlimit()}). If a part refers to what is around it, take that out; of an nnx module take "
            f"nnx.state(module). {_REMEDY}"
        ) from error
