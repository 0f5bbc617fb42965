"""Say how much space on a disk a tree needs, and how much is free."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import Any

from flax_ckpt_compat._core.text_formatting import format_size
from flax_ckpt_compat._core.tree import Node, iter_leaves

_MARGIN = 2**20  # bytes


def describe_space(temporary: str, tree: Node) -> str:
    """Describe the space needed, and the space free once the temporary is removed."""
    folder = os.path.dirname(temporary)
    needed = f"it needs {format_size(_nbytes(tree))} and " if tree is not None else ""
    with suppress(OSError):
        free = shutil.disk_usage(folder).free + _disk_space(temporary)
        # Files take a little more than their leaves.
        is_enough = tree is not None and free > 2 * _nbytes(tree) + _MARGIN
        other = ", so what is used up is a quota, or the number of files (df -i)" if is_enough else ""
        return f"{needed}{format_size(free)} are free in {folder}{other}"
    return f"{needed}nothing is free in {folder}"


def _disk_space(path: str) -> int:
    """Return the disk usage of a file or of the files below a directory, in bytes."""
    block = 512  # bytes, whatever the file system's blocks are (POSIX)
    with suppress(NotADirectoryError, FileNotFoundError):
        return sum(_disk_space(entry.path) for entry in os.scandir(path))
    with suppress(OSError):
        return os.lstat(path).st_blocks * block
    return 0


def _nbytes(tree: Node) -> int:
    return sum(_size_of(leaf) for _, leaf in iter_leaves(tree))


def _size_of(leaf: Any) -> int:
    leaf = getattr(leaf, "data", leaf) if not hasattr(leaf, "nbytes") else leaf
    return int(getattr(leaf, "nbytes", 0)) or (len(leaf) if isinstance(leaf, (str, bytes)) else 0)
