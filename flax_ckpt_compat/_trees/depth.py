"""Limit the depth of trees to what a restore into a target can handle within Python's recursion limit."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flax_ckpt_compat._core.errors import CheckpointError, DepthError
from flax_ckpt_compat._core.tree import Path, show_path

# Calls that Flax's own functions, and so a restore, nest per level, and fixed calls (measured: 3 and 17).
_CALLS_A_LEVEL = 3
_CALLS_BESIDE = 40
_NEVER_TOO_DEEP = 50


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
def limited(doing: str, tree: Any = None) -> Iterator[None]:
    """Translate a RecursionError, in a ``with`` block or a decorated function; ``doing`` completes "cannot be …".

    If the user's ``tree`` contains itself, the error says where."""
    try:
        yield
    except RecursionError as error:
        if isinstance(error, CheckpointError):
            raise
        if (places := _cycle(tree)) is not None:
            inner, outer = (show_path(place) or "its root" for place in places)
            raise DepthError(
                f"the tree contains itself and cannot be {doing}: {inner} is the same object as {outer}. Take that "
                "reference out, or put a copy there; of an nnx module, save nnx.state(module)"
            ) from error
        raise DepthError(
            f"the tree is nested too deeply and cannot be {doing} within Python's recursion limit "
            f"({sys.getrecursionlimit()}). {_REMEDY}"
        ) from error


_REMEDY = "Flatten the tree, or raise the limit with sys.setrecursionlimit, before saving and before restoring"


def _cycle(tree: Any) -> tuple[Path, Path] | None:
    """Return the key path of a container that lies in itself, and that of the same around it; or None."""
    around: dict[int, Path] = {}  # those that are being walked
    known = set[int]()  # those below which there is none, with all that keeps their ids theirs
    stack: list[tuple[Any, Path, Iterator[tuple[str, Any]]]] = [(None, (), iter([("", tree)]))]
    while stack:
        node, path, children = stack[-1]
        for name, child in children:
            below = () if node is None else (*path, name)
            if id(child) in around:
                return below, around[id(child)]
            entries = _children(child)
            if entries is not None and id(child) not in known:
                around[id(child)] = below
                stack.append((child, below, entries))
                break
        else:
            stack.pop()
            around.pop(id(node), None)
            known.add(id(node))
    return None


def _children(node: Any) -> Iterator[tuple[str, Any]] | None:
    """Return the names and children of a container of Python, a dataclass, or a module of nnx; None for all else."""
    if isinstance(node, Mapping):
        return ((str(name), child) for name, child in node.items())
    if isinstance(node, list | tuple):
        return ((str(at), child) for at, child in enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return ((field.name, getattr(node, field.name, None)) for field in dataclasses.fields(node))
    nnx = sys.modules.get("flax.nnx")
    return iter(vars(node).items()) if nnx is not None and isinstance(node, nnx.Module) else None
